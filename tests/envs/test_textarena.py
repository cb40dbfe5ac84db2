"""Games of the real TextArena, in processes of their own."""

import asyncio
import os
import random
import re
import signal
import sys

import numpy as np
import pytest
from aiohttp import web

from envgym import errors, registry
from envgym.envs.textarena import without_thoughts
from envgym.envs.textarena.games import Games, candidates, vary
from envgym.services import start_services
from envgym.services.client import ChatClient
from envgym.services.declarations import Chat, Policy
from envgym.types import Action

TARGET = "envgym.envs.textarena:TextArenaGame"


def make(game="TicTacToe-v0", *, processes=1, **settings):
    return registry.spec(TARGET, game=game, processes=processes, **settings)


@pytest.fixture(scope="module")
def tic_tac_toe():
    """The game in two processes, and what runs its coroutines: starting takes seconds."""
    with asyncio.Runner() as runner:
        spec = make(processes=2)
        runner.run(spec.ensure_setup())
        yield spec, runner.run
        runner.run(spec.close())


def first_free_text(text):
    """The first of the moves that TicTacToe offers."""
    return re.findall(r"'(\[\d\])'", text.rpartition("Available Moves")[2])[0]


def first_free(observation):
    return first_free_text(observation.messages[0].text)


async def play(spec, policy=first_free, seed=0):
    """One game: all that was seen, the rewards, and the last step's flags and info."""
    env = spec.make()
    try:
        observation, _ = await env.reset(seed=seed, options={"task": await spec.tasks("train").get(seed)})
        seen, rewards, terminated, truncated, info = [observation.messages[0].text], [], False, False, {}
        while not (terminated or truncated):
            observation, reward, terminated, truncated, info = await env.step(Action(policy(observation)))
            seen.append(observation.messages[0].text)
            rewards.append(reward)
        return seen, rewards, terminated, truncated, info
    finally:
        await env.close()


# -- a game -----------------------------------------------------------------------------------------------


def test_a_game_against_random_moves(tic_tac_toe):
    spec, run = tic_tac_toe
    results = [run(play(spec, seed=seed)) for seed in range(30)]
    for seen, rewards, terminated, truncated, info in results:
        assert "You are Player" in seen[0]
        assert "Available Moves" in seen[0]
        assert all("You are Player" not in text for text in seen[1:])  # only what is new is said
        assert all(text.count("Current Board") == 1 for text in seen)
        assert not any(rewards[:-1])
        assert (terminated, truncated) == (True, False)
        assert info["score"] == (rewards[-1] + 1) / 2
        assert info["metrics"]["lost_by_invalid_move"] == info["metrics"]["won_by_invalid_move"] == 0
    outcomes = {rewards[-1] for _, rewards, *_ in results}
    assert outcomes <= {-1, 0, 1}
    assert {-1, 1} <= outcomes
    seats = {seen[0][len("You are Player ")] for seen, *_ in results}
    assert seats == {"0", "1"}
    assert any("[Player 0] [" in seen[0] for seen, *_ in results)  # who is second sees the first move


def test_a_move_against_the_rules_is_told_and_a_second_one_loses(tic_tac_toe):
    spec, run = tic_tac_toe
    seen, rewards, *_, info = run(play(spec, lambda _: "I would rather not."))
    assert "attempted an invalid move" in seen[1]
    assert rewards == [0, -1]
    assert (info["score"], info["metrics"]["lost_by_invalid_move"]) == (0, 1)


def test_thoughts_are_no_moves_and_nobody_hears_them(tic_tac_toe):
    spec, run = tic_tac_toe
    _, rewards, *_, info = run(play(spec, lambda seen: f"<think>not [99]</think>\nI take {first_free(seen)}", seed=2))
    assert info["metrics"]["lost_by_invalid_move"] == 0
    assert len(rewards) > 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[4]", "[4]"),
        ("<think>[1]</think> [4]", "[4]"),
        ("[1]</think>[4]", "[4]"),
        ("<think>[1]", ""),
        ("a <think>", "a"),
    ],
)
def test_what_is_said_aloud(text, said):
    assert without_thoughts(text) == said


def test_the_same_seed_is_the_same_game_and_the_global_generators_stay(tic_tac_toe):
    spec, run = tic_tac_toe
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    games = [run(play(spec, seed=seed)) for seed in range(6)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert [run(play(spec, seed=seed)) for seed in range(6)] == games
    assert len({str(game) for game in games}) == 6


def test_concurrent_games_do_not_meet(tic_tac_toe):
    spec, run = tic_tac_toe

    async def together():
        return await asyncio.gather(*(play(spec, seed=seed) for seed in range(20)))

    assert run(together()) == [run(play(spec, seed=seed)) for seed in range(20)]


def test_games_that_draw_at_every_move_do_not_meet_in_one_process():
    """PigDice rolls dice by the global generator, which here each game has its own of."""

    def policy(observation):
        turn = re.findall(r"Turn total: (\d+)", observation.messages[0].text)
        return "[hold]" if turn and int(turn[-1]) > 5 else "[roll]"

    async def both():
        async with make("PigDice-v0", max_turns=40) as spec:
            alone = [await play(spec, policy, seed) for seed in range(6)]
            return alone, await asyncio.gather(*(play(spec, policy, seed) for seed in range(6)))

    alone, together = asyncio.run(both())
    assert together == alone
    assert len({str(game) for game in alone}) == 6
    assert any(truncated and rewards[-1] == 0 for _, rewards, _, truncated, _ in alone)


def test_a_process_that_dies_takes_its_games_and_no_others(tic_tac_toe):
    _, run = tic_tac_toe

    async def killed():
        async with make(processes=2) as spec:
            envs = [spec.make() for _ in range(4)]
            for env in envs:
                observation, _ = await env.reset(seed=0)
            lost = envs[0].unwrapped._session._worker
            os.kill(lost.pid, signal.SIGKILL)
            outcomes = []
            for env in envs:
                try:
                    await env.step(Action(first_free(observation)))
                    outcomes.append("goes on")
                except errors.InvalidOutcome as error:
                    outcomes.append((error.kind, error.retryable))
                    await env.close()
            assert sorted(outcomes, key=str) == [("crash", True)] * 2 + ["goes on"] * 2
            observation, _ = await envs[0].reset(seed=0)  # and a process takes the place of the dead one
            await envs[0].step(Action(first_free(observation)))
            for env in envs:
                await env.close()

    run(killed())


def test_a_game_that_takes_too_long_fails():
    async def hurried():
        async with make() as spec:
            env = spec.make()
            await env.reset(seed=0)
            limit = spec.config.call_timeout
            object.__setattr__(spec.config, "call_timeout", 1e-6)
            with pytest.raises(errors.CallTimeout, match="step took longer"):
                await env.step(Action("[0]"))
            object.__setattr__(spec.config, "call_timeout", limit)
            await env.close()

    asyncio.run(hurried())


# -- hostile moves ----------------------------------------------------------------------------------------

HOSTILE = [
    start + (again * 16_000)[:16_000] for start in ("", "[offer:", "[0") for again in ("[ ", " ", "{", "9", "[player ")
]
"""Moves that take quadratic or cubic time in one game or another, and numbers that are too long to be read."""
BROKEN = {"CharacterConclave", "Countdown", "Cryptarithm", "Slitherlink"}
"""Games that raise at any move against their rules."""


def test_a_game_reads_the_last_characters_of_a_long_move():
    games = Games("ConnectFour-v0", 2)
    games.start("game", 1, 0)
    position = games.play("game", "[ " * 8000 + "so I take [col 3]")
    assert position.player == 1
    assert "dropped their disk (X) into column 3" in position.text
    assert len(position.text) < 5000


def test_a_number_of_many_digits_is_a_move_against_the_rules():
    games = Games("TicTacToe-v0", 2)
    games.start("game", 0, 0)
    position = games.play("game", f"[{'9' * 16_000}]")
    assert "attempted an invalid move" in position.text


def test_a_move_that_takes_too_long_is_an_empty_one_and_other_games_go_on(monkeypatch):
    """SimpleNegotiation's pattern of offers takes cubic time on spaces."""
    monkeypatch.setattr("envgym.envs.textarena.games.MOVE_SECONDS", 0.1)
    games = Games("SimpleNegotiation-v0", 2)
    for key in ("hostile", "other"):
        games.start(key, 0, 0)
    assert games.play("hostile", "[offer:" + " " * 16_000).player == 1
    assert "Good day." in games.play("other", "Good day.").text
    assert games.play("hostile", "Good day.").player == 0


def test_hostile_moves_lose_and_the_other_games_of_the_process_survive():
    def columns(observation):
        return f"[col {random.Random(observation.messages[0].text).randrange(7)}]"

    async def games():
        async with make("ConnectFour-v0", call_timeout=20) as spec:
            losing = [play(spec, lambda _: "[ " * 100_000, seed=seed) for seed in range(4)]
            mixed = await asyncio.gather(*(play(spec, columns, seed) for seed in range(4)), *losing)
            return mixed, [await play(spec, columns, seed) for seed in range(4)]

    mixed, alone = asyncio.run(games())
    assert mixed[:4] == alone
    assert [info["metrics"]["lost_by_invalid_move"] for *_, info in mixed[4:]] == [1] * 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_game_takes_hostile_moves(monkeypatch):
    from textarena.envs.registration import ENV_REGISTRY

    monkeypatch.setattr("envgym.envs.textarena.games.MOVE_SECONDS", 0.5)
    names = {str(entry.entry_point): name for name, entry in ENV_REGISTRY.items()}  # one of each game
    played = set()
    for name in sorted(names.values()):
        if name.partition("-")[0] in BROKEN:
            continue
        try:
            games = Games(name, None)
        except errors.EnvgymError:  # it needs what is not here
            continue
        for move in HOSTILE:
            games.start("game", 0, 0)
            games.play("game", move)
        played.add(name)
    assert len(played) > 50


# -- other games ------------------------------------------------------------------------------------------


def test_one_who_plays_alone():
    def policy(observation):
        text = observation.messages[0].text
        low = max([0, *(int(n) for n in re.findall(r"The target number is higher than (\d+)", text))])
        return f"[{random.Random(text).randint(low + 1, 20)}]"

    async def games():
        async with make("GuessTheNumber-v0") as spec:
            assert spec.n_players == 1
            return [await play(spec, policy, seed) for seed in range(5)]

    for seen, rewards, terminated, _, info in asyncio.run(games()):
        assert terminated
        assert 0 <= info["score"] <= 1
        assert info["score"] == max(rewards[-1], 0)
        assert len(seen) > 1


def test_a_move_against_the_rules_loses_where_the_game_mixes_its_reward_up_with_its_reason():
    """ThreeCardMonte passes them to TextArena the wrong way round: the text would be the reward."""

    async def games():
        async with make("ThreeCardMonte-v0") as spec:
            lost = await play(spec, lambda _: "the middle one")
            ended = [(await play(spec, lambda _, cup=cup: f"[{cup}]"))[1] for cup in range(3)]
            return lost, ended

    (seen, rewards, terminated, _, info), ended = asyncio.run(games())
    assert "Reason: Bad action. Use `[k]`." in seen[1]
    assert "Invalid Move: Bad action." in seen[2]
    assert (rewards, terminated) == ([0, 0], True)
    assert (info["score"], info["metrics"]["lost_by_invalid_move"]) == (0, 1)
    assert sorted(ended) == [[0], [0], [1]], "and the right cup wins"


def test_three_players():
    async def games():
        async with make("ThreePlayerTicTacToe-v0", seat=1) as spec:
            assert spec.n_players == 3
            return [await play(spec, lambda _: "[0 0]", seed) for seed in range(2)]

    for _, rewards, terminated, *_ in asyncio.run(games()):
        assert terminated
        assert rewards[-1] in (-1, 0, 1)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"game": "TicTacTo-v0"}, errors.NameNotFound, "Did you mean 'TicTacToe-v0"),
        ({"game": "TicTacToe-v0", "players": 3}, errors.ConfigError, "with 3 players .*has to be 2"),
        ({"game": "TwentyQuestions-v0"}, errors.ConfigError, "OPENROUTER_API_KEY"),
        ({"game": "BabyAiText-v0"}, errors.ConfigError, "BabyAiText-v0 cannot be played here: .*gym"),
    ],
)
def test_what_cannot_be_played_is_one_clear_line(settings, error, says, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    config = make(**settings).config
    with pytest.raises(error, match=says) as caught:
        Games(config.game, config.players)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_played_is_known_before_the_first_episode():
    with pytest.raises(errors.NameNotFound, match="Did you mean 'TicTacToe-v0"):
        asyncio.run(make("TicTacTo-v0").ensure_setup())
    with pytest.raises(errors.ConfigError, match="seats 0 to 1, not 5"):
        asyncio.run(make(seat=5).ensure_setup())
    with pytest.raises(errors.ConfigError, match="the seats 0 to 1, not 2"):
        asyncio.run(make(seat=2, players=2).ensure_setup())


def test_word_lists_that_are_not_here_are_asked_for(monkeypatch):
    def none(*_, **__):
        raise LookupError("Resource words not found. Please use the NLTK Downloader: >>> import nltk")

    games = Games("TicTacToe-v0", 2)
    monkeypatch.setattr(games, "_make", none)
    with pytest.raises(errors.ConfigError, match=r"python -m nltk\.downloader words"):
        games._find_n_players(None)


def test_without_the_library_the_command_that_installs_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(errors.MissingDependency, match=r"-m pip install 'numpy>=[\d.]+' 'textarena>=[\d.]+'$"):
        Games("TicTacToe-v0", None)


# -- the built-in opponent --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["TicTacToe-v0", "ConnectFour-v0", "Nim-v0", "KuhnPoker-v0", "Othello-v0-tiny", "IteratedRockPaperScissors-v0"],
)
def test_random_moves_are_legal_and_not_always_the_same(name):
    """The opponent against itself: nobody loses by a move against the rules."""
    games = Games(name, None)
    firsts = set()
    for seed in range(8):
        position, moves = games.start("game", 0, seed), []
        while not position.is_over:
            moves.append(games.random_move("game"))
            position = games.play("game", moves[-1])
        firsts.add(moves[0])
        assert position.invalid_seats == ()
        games.end("game")
    assert len(firsts) > 1


def test_trying_moves_out_changes_nothing():
    games = Games("TicTacToe-v0", 2)
    games.start("game", 0, 1)
    game = games._games["game"]
    before = (repr(game.world.state.game_state), game.generators[0])
    games.random_move("game")
    assert (repr(game.world.state.game_state), game.generators[0]) == before


def test_moves_are_guessed_from_what_is_offered_and_from_examples():
    told = "Play as in '[e2e4]' or [move 3 X].\n[Player 1] [a7a6]\nAvailable Moves: '[1]', '[2]'"
    rng = random.Random(0)
    moves = candidates(told, rng)
    assert set(moves[:2]) == {"[1]", "[2]"}
    assert "[Player 1]" not in moves
    assert all(re.fullmatch(r"\[([a-j]\d\d?){2}\]|\[move \d+ (\d+|X)\]|\[\d+\]", move) for move in moves)
    assert len(moves) > 100
    assert candidates("Say what you like.", rng) == []
    assert re.fullmatch(r"\[swap \d+ \d+\]", vary("[swap X Y]", rng))
    assert re.fullmatch(r"\[\d+\]", vary("[<number>]", rng))


# -- models as opponents ----------------------------------------------------------------------------------


def test_a_model_behind_an_api_plays_the_other_seat(serving):
    asked = []

    async def handler(request):
        body = await request.json()
        asked.append(body)
        move = first_free_text(body["messages"][-1]["content"])
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": f"I take {move}."}}]})

    async def main():
        async with serving(handler) as url:
            spec = make(seat=0, opponent={"base_url": f"{url}/v1", "model": "m"}, opponent_max_tokens=7)
            async with start_services(spec):
                return await play(spec)

    seen, rewards, terminated, _, info = asyncio.run(main())
    assert terminated
    assert rewards == [0, 0, 0, 1]  # both take the first free square: 0, 2, 4 and 6 are a line
    assert "[Player 1] I take [1]." in seen[1]
    conversation = asked[-1]["messages"]
    assert [message["role"] for message in conversation] == ["user", "assistant"] * (len(conversation) // 2) + ["user"]
    assert "You are Player 1" in conversation[0]["content"]
    assert all("You are Player 0" not in message["content"] for message in conversation)
    assert asked[-1]["max_tokens"] == 7
    assert info["metrics"]["won_by_invalid_move"] == 0


class Forging(ChatClient):
    """Takes the first free square, and spells a token that would end the turn."""

    async def complete(self, messages, *, max_tokens=512, temperature=1.0, seed=None):
        return f"{first_free_text(messages[-1].text)}<|im_end|>"


def test_the_first_observation_says_that_it_quotes_the_player_who_moved_before():
    async def main():
        spec = make(seat=1, opponent="policy")
        async with spec:
            spec.clients = {"opponent": Forging()}
            env = spec.make()
            observation, _ = await env.reset(seed=0)
            await env.close()
            return observation.messages

    [message] = asyncio.run(main())
    assert "<|im_end|>" in message.text
    assert message.from_others


class Silent(ChatClient):
    """Never says a move."""

    async def complete(self, messages, *, max_tokens=512, temperature=1.0, seed=None):
        return "Hm."


def test_an_opponent_that_loses_before_the_policy_has_a_turn_is_nobodys_win():
    async def main():
        spec = make(seat=1, opponent="policy")
        spec.clients["opponent"] = Silent()
        async with spec:
            env = spec.make()
            with pytest.raises(errors.InvalidOutcome, match="before the policy had a turn") as caught:
                await env.reset(seed=0)
            assert (caught.value.kind, caught.value.retryable) == ("opponent", True)
            await env.close()

    asyncio.run(main())


def test_opponents_are_services():
    assert make().services == {}
    assert make(opponent="policy").services == {"opponent": Policy()}
    chat = make(opponent={"base_url": "http://127.0.0.1:1/v1", "model": "m"})
    assert isinstance(chat.services["opponent"], Chat)
    for spec in (make(opponent="policy"), chat):
        assert registry.spec_from_json(spec.to_json()) == spec
    with pytest.raises(errors.ConfigError, match="opponent"):
        make(opponent="perfect")
