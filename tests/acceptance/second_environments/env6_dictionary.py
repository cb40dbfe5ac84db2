"""Ask a dictionary tool for a word of the invented language Tok, and answer with it."""

import random

import envgym

WORDS = """
cat hat dog box key pen cup bag sun bed map fan net jar pig cow bus car egg ant bee fox hen jam leg arm ear eye lip toe
man boy bat bug can cap cot cub den dot fig fin fog gum hay hip hog ice ink jet jug kid kit lid log mat mud mop mug nut
oak oil owl pan paw pea pet pie pin pit pot ram rat rib rod rug saw sea sky tap tea tie tin top toy tub van wax web wig
big red old say new hot wet dry low up
""".split()


def in_tok(word):
    """The word in Tok: three letters, always the same for a word."""
    rng = random.Random(f"tok {word}")
    return rng.choice("bdfgklmnprst") + rng.choice("aeiou") + rng.choice("bdfgklmnprst")


class Dictionary(envgym.ToolEnv):
    """1 for the word in Tok, a tenth for a wrong answer after a look into the dictionary."""

    def begin(self):
        self.looked = False
        return f"What is {self.task.prompt} in Tok?"

    def tools(self):
        return [self.look]

    def look(self, word: str) -> str:
        """Look up a word in Tok."""
        if word not in WORDS:
            return "no such word"
        self.looked = self.looked or word == self.task.prompt
        return in_tok(word)

    def grade(self, action):
        score = float(action.text.strip() == self.task.answer)
        return envgym.Reward(score or (0.1 if self.looked else 0.0), score=score)


class DictionarySpec(envgym.EnvSpec):
    """Every third word is held out."""

    env_class = Dictionary
    Config = envgym.ToolEnvConfig
    agent = "tool_calling"

    def tasks(self, split):
        words = [word for number, word in enumerate(WORDS) if (number % 3 == 0) == (split == "test")]
        return envgym.TaskList([envgym.Task(id=word, prompt=word, answer=in_tok(word)) for word in words])

    def demonstrations(self, task, seed):
        """One call, then its result."""
        call = envgym.ToolCall("call_0", "look", {"word": task.prompt})
        return [envgym.Message("assistant", (), (call,)), task.answer]
