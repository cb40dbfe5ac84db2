"""Take the middle letter out of a word of three letters: cat becomes ct."""

import envgym

WORDS = """
cat hat dog box key pen cup bag sun bed map fan net jar pig cow bus car egg ant bee fox hen jam leg arm ear eye lip toe
man boy bat bug can cap cot cub den dot fig fin fog gum gun hay hip hog ice ink jet jug kid kit lid log mat mud mop mug
nut oak oar oil owl pan paw pea pet pie pin pit pot ram rat rib rod rug saw sea shy sky tap tea tie tin top toy tub van
wax web wig yak zip big red old say new hot wet dry low
""".split()


class NoMiddle(envgym.Env):
    """The reward is the share of letters in the right position; extra letters lower it."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": f"Take the middle letter out of {self.task.prompt}."}], {}

    async def step(self, action):
        answer, right = action.text.strip(), self.task.answer
        share = sum(guess == letter for guess, letter in zip(answer, right)) / max(len(answer), len(right))
        return None, share, True, False, {"score": share, "answer": answer}


class NoMiddleSpec(envgym.EnvSpec):
    """Every third word is held out."""

    env_class = NoMiddle

    def tasks(self, split):
        words = [word for number, word in enumerate(WORDS) if (number % 3 == 0) == (split == "test")]
        return envgym.TaskList([envgym.Task(id=word, prompt=word, answer=word[0] + word[2]) for word in words])
