"""Rows with images have one policy in every layout of a worker, as transformers defines it: nine families."""

from __future__ import annotations

import pytest

from tests.vision_models import KINDS, make_vision_model
from tests.workers.test_images import SIZES, TEXT, Vision, mixed_rows, picture

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_rows_padded_packed_and_alone_are_those_of_transformers(tmp_path, store, kind):
    make_vision_model(kind, tmp_path / "model", TEXT)
    vision = Vision(kind, tmp_path)
    rows = mixed_rows(vision)
    expected = [vision.reference(row) for row in rows]

    def largest(results):
        return max(float((a - b).abs().max()) for a, b in zip(results, expected, strict=True))

    [changed] = vision.logprobs([vision.row(picture(9, SIZES[2]), "\n And in this one? It is blue.")])
    figures = {
        "another_picture": float((changed - expected[1])[1:].abs().mean()),
        "padded": largest(vision.logprobs(rows)),
        "packed": largest(vision.logprobs(rows, "packed")),
        "alone": largest([vision.logprobs([row])[0] for row in rows]),
    }
    store(f"image_layouts_{kind}", nats=figures, placeholders=[[span.length for span in row.images] for row in rows])
    assert figures.pop("another_picture") > 1e-2
    assert max(figures.values()) < 1e-5
