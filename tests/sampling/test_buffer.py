import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memsearcher_jax.sampling.buffer import pad, place, splice

ROWS = 3
WIDTHS = (4, 6, 2)
rows_of_parts = st.tuples(
    *(st.lists(st.lists(st.integers(1, 99), max_size=width), min_size=ROWS, max_size=ROWS) for width in WIDTHS)
)


@settings(deadline=None, max_examples=40)
@given(rows_of_parts, st.integers(0, 99))
def test_spliced_parts_read_like_the_contiguous_prompt(parts, garbage):
    """Whatever stands in the padding."""
    padded = [pad(rows, width) for rows, width in zip(parts, WIDTHS, strict=True)]
    for part in padded:
        part.ids_SW[np.arange(part.ids_SW.shape[1]) >= part.length_S[:, None]] = garbage
    joined = splice(padded)
    for row in range(ROWS):
        whole = [id for part in parts for id in part[row]]
        assert joined.ids_SW[row, : joined.length_S[row]].tolist() == whole
    assert joined.ids_SW.shape == (ROWS, sum(WIDTHS))


def test_lengths_are_arrays_so_that_one_program_serves_all():
    compiled = jax.jit(lambda parts: splice(parts).length_S)
    for length in (0, 3, 6):
        assert compiled([pad([[1] * length], 6)]).tolist() == [length]
    assert compiled._cache_size() == 1


def test_what_would_run_past_the_end_is_dropped():
    values_SC = jnp.zeros((2, 4), jnp.int32)
    placed = place(values_SC, jnp.array([3, 0]), pad([[7, 8], [9]], 2))
    assert placed.tolist() == [[0, 0, 0, 7], [9, 0, 0, 0]]


def test_a_text_wider_than_its_buffer_is_refused():
    with pytest.raises(ValueError, match="3 tokens does not fit a buffer of 2"):
        pad([[1, 2, 3]], 2)
