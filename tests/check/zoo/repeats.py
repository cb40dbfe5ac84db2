"""The same seed and task do not make the same episode."""

import os
import random
import tempfile

from healthy import Sums

import envgym


class IgnoresItsSeed(Sums):
    """A generator of its own that nobody seeds."""

    async def reset(self, *, seed=None, options=None):
        observation, info = await super().reset(seed=seed, options=options)
        self.luck = random.Random().randrange(1000)
        return observation, info


class EndsByChance(IgnoresItsSeed):
    async def step(self, action):
        observation, reward, terminated, _, info = await super().step(action)
        return observation, reward, terminated or random.Random().random() < 0.5, False, info


class RemembersEpisodes(Sums):
    """Each episode depends on how many there were before."""

    played = 0

    async def reset(self, *, seed=None, options=None):
        observation, info = await super().reset(seed=seed, options=options)
        RemembersEpisodes.played += 1
        self.luck = RemembersEpisodes.played
        return observation, info


class SameProblemForAll(envgym.Env):
    """Whatever the seed."""

    async def reset(self, *, seed=None, options=None):
        word = "".join(random.Random(0).choices("abc", k=3))
        return [{"role": "user", "content": f"Write {word} backwards."}], {}

    async def step(self, action):
        return None, float(action.text == "acb"), True, False, {}


class GlobalGenerator(Sums):
    async def reset(self, *, seed=None, options=None):
        observation, info = await super().reset(seed=seed, options=options)
        self.luck = random.randrange(1000)
        return observation, info


class SeedsTheGlobalGenerator(Sums):
    """As `set_seed` of many a library does."""

    async def reset(self, *, seed=None, options=None):
        random.seed(seed)
        return await super().reset(seed=seed, options=options)


class NumpyGenerator(Sums):
    async def reset(self, *, seed=None, options=None):
        import numpy

        observation, info = await super().reset(seed=seed, options=options)
        self.luck = int(numpy.random.randint(1000))
        return observation, info


class OrderOfASet(Sums):
    """Hashes of text are others in each process."""

    async def reset(self, *, seed=None, options=None):
        observation, info = await super().reset(seed=seed, options=options)
        self.luck = self.rng.choice(list({f"word{number}" for number in range(50)}))
        return observation, info


class SharedSecret(Sums):
    """One for all episodes in play: the class's."""

    async def reset(self, *, seed=None, options=None):
        observation, info = await super().reset(seed=seed, options=options)
        SharedSecret.luck = self.__dict__.pop("luck")
        return observation, info


class SharedOnTheSpec(Sums):
    """The same on the spec, which all instances share."""

    async def reset(self, *, seed=None, options=None):
        self.spec.task = options["task"]
        return await super().reset(seed=seed, options=options)

    def is_right(self, text):
        self.luck = self.spec.task.id
        return super().is_right(text)


class ChangesTheFolder(Sums):
    async def reset(self, *, seed=None, options=None):
        os.chdir(tempfile.gettempdir())
        return await super().reset(seed=seed, options=options)


class WritesVariables(Sums):
    async def reset(self, *, seed=None, options=None):
        os.environ["PROBLEM"] = options["task"].id
        return await super().reset(seed=seed, options=options)


class SharesItsTries(Sums):
    """A fork and its instance count the tries of both."""

    async def reset(self, *, seed=None, options=None):
        self.tries = []
        return await super().reset(seed=seed, options=options)

    async def step(self, action):
        self.tries.append(action.text)
        self.left = 3 - len(self.tries)
        return await super().step(action)


class ForksItself(Sums):
    def fork(self):
        return self


class ResetsHalf(Sums):
    """An instance that was played already goes on where it was."""

    played = 0

    async def reset(self, *, seed=None, options=None):
        observation, info = await super().reset(seed=seed, options=options)
        self.played += 1
        self.luck = self.played
        return observation, info
