"""Find the one vowel of a short word."""

import envgym

VOWELS = "aeiou"
# some 30 words of three or four letters for each vowel; the last seven of each are held out
WORDS = {
    "a": "cat hat bag map man pan cap van jam lamp hand sand flag camp glad plan band last crab snap"
    " tap rag clap dad ham bat mask fast tank grab",
    "e": "bed pen red ten leg net wet hen jet nest tent best desk help step bell left send west sled"
    " pet men belt get web vet rest neck tell shed",
    "i": "pig sit big pin lip wig fin hid kid fish milk gift wind ship trip swim hill list king drip"
    " six win silk dig bin fix wish pink fill grin",
    "o": "dog box hot top pot fox log mop job frog soft rock lock stop drop doll long song lost spot"
    " hop cot pond got sob nod jog sock fog golf shop",
    "u": "cup sun bus run mud bug cut hut rug duck jump dust drum plug club must bunk hunt lung snug"
    " tub nut dump fun hum gum rub rust luck stub",
}


class Vowel(envgym.Env):
    """Say the vowel of the word; another vowel gets a tenth of the reward."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        answer = action.text.strip().lower().rstrip(".")
        right = answer == self.task.answer
        is_vowel = len(answer) == 1 and answer in VOWELS
        return None, 1.0 if right else 0.1 if is_vowel else 0.0, True, False, {"score": float(right), "answer": answer}


class VowelSpec(envgym.EnvSpec):
    """Seven words of each vowel are held out."""

    env_class = Vowel

    def tasks(self, split):
        tasks = []
        for vowel, text in WORDS.items():
            words = list(dict.fromkeys(text.split()))  # each word once
            for word in words[-7:] if split == "test" else words[:-7]:
                prompt = f"Which vowel is in {word}? Say a, e, i, o or u."
                tasks.append(envgym.Task(id=word, prompt=prompt, answer=vowel))
        return envgym.TaskList(tasks)
