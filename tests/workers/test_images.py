"""Rows with images go through a vision-language model as it is defined, in any layout, and with other images they have
other log-probabilities."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from envgym.errors import ConfigError, DataError, RunError
from envgym.images import ImageFolder
from envgym.learner import pad
from envgym.types import ImagePart, ImageSpan, Objective, Row
from envgym.workers.attention import VARLEN
from envgym.workers.config import ImageConfig
from envgym.workers.images import (
    BLANK,
    ImageTensors,
    attend_within_images,
    check_takes_images,
    collate,
    run_beside_blank_row,
)
from envgym.workers.micro_batches import choose_layout, network_inputs
from envgym.workers.network import TokenNetwork
from tests.vision_models import KINDS, MARKERS, TOKENS, make_vision_model

CPU = torch.device("cpu")
TEXT = ["What colour is the thing in this picture? It is red, green or blue.\n\n", "Not so. And in this one?\n"] * 20
FAST = ("llava", "qwen2_5_vl")
FAMILIES = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
SIZES = [(40, 50), (90, 56), (56, 56)]


def picture(seed, size=(40, 50)):
    """An image of noise, `size` wide and high."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return ImagePart.from_value(noise)


class Vision:
    """A model of a kind, its processor, and rows for it. `size`: of images, in the processor's own words."""

    def __init__(self, kind, folder, size=None):
        self.kind, self.folder, self.size = kind, folder, size
        self.processor = AutoProcessor.from_pretrained(folder / "model")
        self.model = AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
        self.network = TokenNetwork(self.model, "lm").eval()
        self.images = ImageFolder(folder / "images")
        self.tensors = ImageTensors(self.model, str(folder / "model"), self.config, CPU)

    @property
    def config(self):
        return ImageConfig(str(self.images.path), self.size)

    def row(self, *parts, key=0):
        """A row of texts and images. Its ids are the processor's for all of them at once."""
        marker = MARKERS.get(self.kind, TOKENS[self.kind][0])
        before, after = ("<|vision_start|>", "<|vision_end|>") if "qwen" in self.kind else ("", "")
        pictures = [part for part in parts if isinstance(part, ImagePart)]
        for part in pictures:
            self.images.store(part)
        text = "".join(part if isinstance(part, str) else before + marker + after for part in parts)
        opened = [Image.open(self.images.find(part.sha256)).convert("RGB") for part in pictures]
        options = {"size": self.size} if self.size and opened else {}
        images = [opened] if opened else None
        [ids] = self.processor(text=[text], images=images, add_special_tokens=False, **options)["input_ids"]
        ids, spans, end = np.array(ids).tolist(), [], 0
        for part, image in zip(pictures, opened, strict=True):
            run = self.run(image, marker)
            start = next(i for i in range(end, len(ids)) if ids[i : i + len(run)] == run)
            end = start + len(run)
            spans.append(ImageSpan(part.sha256, start, len(run)))
        weights = np.ones(len(ids), np.float32)
        weights[0] = 0
        old = np.full(len(ids), np.nan, np.float32)
        return Row.from_arrays(
            np.array(ids, np.int32), weights, old, Objective.CROSS_ENTROPY, images=tuple(spans), microbatch_key=key
        )

    def run(self, image, marker):
        options = {"size": self.size} if self.size else {}
        outputs = self.processor(
            text=[marker], images=[[image]], add_special_tokens=False, return_text_replacement_offsets=True, **options
        )
        text = outputs["text_replacement_offsets"][0][0]["replacement"]
        return self.processor.tokenizer(text.strip("\n"), add_special_tokens=False)["input_ids"]

    def logprobs(self, rows, layout="padded"):
        """The log-probabilities of rows in one micro-batch."""
        self.network.packed = layout == "packed"
        images = self.tensors.tensors(rows, packed=layout == "packed", blank=False)
        inputs = network_inputs(rows, [pad(rows, CPU)], CPU, layout, images=images)
        with torch.no_grad():
            outputs = self.network(*inputs)["logprobs"]
        return [line[: len(row.token_ids)] for line, row in zip(outputs, rows, strict=True)]

    def reference(self, row):
        """The log-probabilities of a row by transformers, whose processor gets text and images at once."""
        ids = torch.tensor(row.token_ids.tolist())[None]
        opened = [Image.open(self.images.find(span.sha256)).convert("RGB") for span in row.images]
        options = {"size": self.size} if self.size else {}
        features = {}
        if opened:
            marker = MARKERS.get(self.kind, TOKENS[self.kind][0])
            features = self.processor(text=[marker * len(opened)], images=[opened], return_tensors="pt", **options)
            features = {name: value for name, value in features.items() if name not in ("input_ids", "attention_mask")}
            for name in features.keys() & {"mm_token_type_ids", "token_type_ids"}:
                features[name] = torch.tensor(self.processor.create_mm_token_type_ids(ids.tolist()))
        with torch.no_grad():
            states = self.model.base_model(input_ids=ids, use_cache=False, **features).last_hidden_state
            logits = torch.nn.functional.linear(states, self.model.get_output_embeddings().weight)[0]
        logprobs = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return torch.nn.functional.pad(logprobs, (1, 0))


@pytest.fixture(scope="module")
def make_vision(tmp_path_factory):
    """make_vision(kind) -> a `Vision` of the kind, which is made once."""
    made = {}

    def make(kind, **options):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            make_vision_model(kind, made[kind] / "model", TEXT)
        return Vision(kind, made[kind], **options)

    return make


def mixed_rows(vision):
    """Rows with two images of different sizes, one, none, and with adjacent ones."""
    a, b, c = (picture(seed, size) for seed, size in enumerate(SIZES))
    return [
        vision.row("What colour is the thing in this picture?", a, TEXT[1], b, " It is red, green or blue.", key=0),
        vision.row(c, "\n And in this one? It is blue.", key=1),
        vision.row("It is red, green or blue. And in this picture? What colour is it?\n\n", key=2),
        vision.row("What", b, c, "\n\nthing", key=3),
    ]


@pytest.mark.parametrize("kind", FAMILIES)
def test_padded_packed_and_alone_a_row_has_the_log_probabilities_that_transformers_gives_it(make_vision, kind):
    vision = make_vision(kind)
    rows = mixed_rows(vision)
    [changed] = vision.logprobs([vision.row(picture(9, SIZES[2]), "\n And in this one? It is blue.")])
    expected = [vision.reference(row) for row in rows]
    assert (changed - expected[1])[1:].abs().mean() > 1e-2, "the picture does not matter"
    for layout in ("padded", "packed"):
        for logprobs, reference in zip(vision.logprobs(rows, layout), expected, strict=True):
            torch.testing.assert_close(logprobs, reference, atol=1e-5, rtol=0)
        for row, reference in zip(rows, expected, strict=True):
            torch.testing.assert_close(vision.logprobs([row], layout)[0], reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_blank_image_changes_no_number_and_brings_the_tower_into_the_graph(make_vision, kind):
    """In a micro-batch without an image, of a step that has some: other ranks reduce the tower's gradients."""
    vision = make_vision(kind)
    texts = [vision.row(text, key=key) for key, text in enumerate(["What?", "It is red, green or blue. And this?\n"])]
    for layout in ("padded", "packed"):
        vision.network.packed = layout == "packed"
        assert vision.tensors.tensors(texts, packed=False, blank=False) == {}
        images = vision.tensors.tensors(texts, packed=layout == "packed", blank=True)
        assert BLANK in images
        inputs = network_inputs(texts, [pad(texts, CPU)], CPU, layout, images=images)
        outputs = vision.network(*inputs)["logprobs"]
        for line, row in zip(outputs.detach(), texts, strict=True):
            torch.testing.assert_close(line[: len(row)], vision.reference(row), atol=1e-5, rtol=0)
        vision.model.zero_grad()
        outputs.sum().backward()
        assert vision.model.get_input_embeddings().weight.grad.any()
        reached = [name for name, p in vision.model.named_parameters() if p.grad is not None and not p.grad.any()]
        tower = [name for name, _ in vision.model.named_parameters() if "vision" in name or "visual" in name]
        assert tower
        assert len(set(tower) - set(reached)) < len(tower) / 2  # some heads of towers have no use at all


def test_rows_with_equal_tokens_and_other_pictures_share_no_prefix(make_vision):
    vision = make_vision("llava")
    a, b = (vision.row(picture(seed, (56, 56)), "What colour is the thing in this picture?") for seed in (1, 2))
    assert a.token_ids.tolist() == b.token_ids.tolist()
    options = {"shares_prefixes": True, "packed": False}
    assert choose_layout([a.copy_with(images=()), b.copy_with(images=())], **options) == "shared"
    assert choose_layout([a, b], **options) == "padded"
    first, second = vision.logprobs([a, b])
    assert (first - second)[20:].abs().mean() > 1e-2
    torch.testing.assert_close(first, vision.reference(a), atol=1e-5, rtol=0)
    torch.testing.assert_close(second, vision.reference(b), atol=1e-5, rtol=0)


@pytest.fixture
def llava(make_vision):
    return make_vision("llava")


def test_an_image_that_is_missing_or_changed_is_named(llava):
    row = llava.row("What", picture(3), " colour?")
    [span] = row.images
    other = row.copy_with(images=(ImageSpan("ab" * 32, span.start, span.length),))
    with pytest.raises(DataError, match=rf"^image {'ab' * 32} is not in .*images: its file was deleted"):
        llava.logprobs([other])
    outside = row.copy_with(images=(ImageSpan("../model/config", span.start, span.length),))
    with pytest.raises(DataError, match="model/config is not in"):
        llava.logprobs([outside])
    llava.images.find(span.sha256).write_bytes(llava.images.find(llava.row(picture(4)).images[0].sha256).read_bytes())
    with pytest.raises(DataError, match=r"^image .*\.png has changed: its content is not what it is named after$"):
        llava.logprobs([row])


def test_spans_must_be_the_placeholders_of_their_images(llava):
    row = llava.row("What", picture(5), " colour?")
    [span] = row.images
    for wrong in (span._replace(start=span.start + 1), span._replace(length=span.length - 1)):
        with pytest.raises(RunError, match=rf"^image {span.sha256} has 16 placeholders in this model, .* of a row"):
            llava.logprobs([row.copy_with(images=(wrong,))])
    sampled = row.copy_with(token_ids=np.append(row.token_ids, span_token := row.token_ids[span.start]))
    assert span_token == llava.model.config.image_token_id
    with pytest.raises(RunError, match=r"^a row has 17 placeholders, 16 of which belong to its images$"):
        llava.logprobs([sampled])
    text = llava.row("It is blue.")
    with pytest.raises(RunError, match="1 placeholders, 0 of"):  # of the policy, in a step with images
        llava.logprobs([row, text.copy_with(token_ids=np.append(text.token_ids, span_token))])


def test_the_size_of_images_is_the_processors_own_argument(make_vision):
    small = make_vision("qwen2_5_vl")
    image = picture(7, (200, 200))
    row = small.row(image, "What colour?")
    large = make_vision("qwen2_5_vl", size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112})
    larger = large.row(image, "What colour?")
    assert (row.images[0].length, larger.images[0].length) == (4, 16)
    torch.testing.assert_close(large.logprobs([larger])[0], large.reference(larger), atol=1e-5, rtol=0)
    with pytest.raises(RunError, match="has 4 placeholders in this model"):
        small.logprobs([larger])


def test_an_image_is_processed_once_until_memory_is_full(llava, monkeypatch):
    calls = []
    process = ImageTensors._process
    monkeypatch.setattr(ImageTensors, "_process", lambda self, image: calls.append(image) or process(self, image))
    rows = [llava.row(picture(seed), "What?") for seed in range(10, 14)]
    llava.logprobs(rows)
    llava.logprobs(rows)
    assert len(calls) == 4
    n_bytes = next(iter(llava.tensors._cache.values())).n_bytes
    assert n_bytes == 3 * 56 * 56 * 4
    monkeypatch.setattr("envgym.workers.images.CACHED_BYTES", 2 * n_bytes)
    llava.logprobs([llava.row(picture(14), "What?")])
    assert list(llava.tensors._cache) == [rows[3].images[0].sha256, llava.row(picture(14)).images[0].sha256]
    llava.logprobs([rows[3], rows[2]])
    assert len(calls) == 6  # the one that was used last stayed


def test_tensors_of_images_are_padded_behind_the_first_dimension():
    a, b = torch.ones(1, 2, 3), torch.full((2, 3, 2), 2.0)
    result = collate([{"x": a, "n": torch.tensor([1])}, {"x": b, "n": torch.tensor([2, 3])}])
    assert result["x"].shape == (3, 3, 3)
    assert result["n"].tolist() == [1, 2, 3]
    assert torch.equal(result["x"][:1, :2], a)
    assert torch.equal(result["x"][1:, :, :2], b)
    assert result["x"].sum() == a.sum() + b.sum()


def test_kernels_without_masks_are_not_for_towers_nor_for_attention_both_ways(make_vision):
    llava = make_vision("llava")
    llava.model.config._attn_implementation = VARLEN
    attend_within_images(llava.model)
    assert llava.model.config._attn_implementation == VARLEN
    ImageTensors(llava.model, str(llava.folder / "model"), llava.config, CPU)
    assert llava.model.config.text_config._attn_implementation == VARLEN
    assert llava.model.base_model.vision_tower.config._attn_implementation == "sdpa"
    gemma = make_vision("gemma3")
    gemma.model.config._attn_implementation = "flash_attention_2"
    attend_within_images(gemma.model)
    assert gemma.model.config.text_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("packed", [False, True])
def test_the_routers_numbers_of_a_blank_row_are_left_out(packed):
    """Experts are balanced over the tokens of the rows alone."""
    n_rows, length, n_blank = 2, 5, 7
    shape = (1, 8 + n_blank, 3) if packed else (n_rows + 1, n_blank, 3)
    states = torch.arange(float(np.prod(shape))).view(shape)
    base = SimpleNamespace(last_hidden_state=states, router_logits=(states.flatten(0, 1) * 2,))

    def run(token_ids, lengths, options):
        assert token_ids.tolist() == [[1] * 5 + [0] * 2] * 2 + [[9] * 7]
        assert lengths.tolist() == [5, 3, 7]
        assert options == {"pixels": 1}
        return base

    rows, options = torch.ones(n_rows, length, dtype=torch.long), {BLANK: torch.full((n_blank,), 9), "pixels": 1}
    result, [logits] = run_beside_blank_row(run, rows, torch.tensor([5, 3]), options, packed=packed)
    assert torch.equal(result, states[:, :8] if packed else states[:2, :5])
    assert torch.equal(logits, 2 * result.flatten(0, 1))


def test_models_that_take_no_images_are_refused(llava):
    with pytest.raises(ConfigError, match=r"^a row has an image, and the critic cannot see it: critics and reward"):
        check_takes_images(llava.model.config, "critic", "scalar")
    with pytest.raises(ConfigError, match=r"^a row has an image, and the teacher \(qwen2\) takes texts alone: name a"):
        check_takes_images(llava.model.config.text_config, "teacher", "lm")
