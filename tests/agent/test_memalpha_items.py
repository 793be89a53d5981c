"""Items that share what they hold behave as tuples do, whichever of them grew from which."""

from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.agent.memalpha_items import Items
from memsearcher_jax.agent.memalpha_memory import Item

CONTENTS = ["a", "b", "", 1, True, 2.5, None, ["a"], ["b"], {"a": 1}]
steps = st.lists(
    st.tuples(
        st.integers(0, 50), st.sampled_from(["add", "add", "add", "replace", "remove"]), st.sampled_from(CONTENTS)
    ),
    max_size=30,
)


@given(steps)
def test_any_value_can_be_grown_and_none_of_the_others_changes(some):
    values, tuples = [Items()], [()]
    for number, (chosen, what, content) in enumerate(some):
        place = chosen % len(values)
        items, plain, item = values[place], tuples[place], Item(f"{number:04x}", content, 1)
        if what == "add":
            values.append(items.added(item))
            tuples.append((*plain, item))
        elif plain:
            at = chosen % len(plain)
            values.append(items.replaced(at, item) if what == "replace" else items.without(at))
            tuples.append((*plain[:at], *((item,) if what == "replace" else ()), *plain[at + 1 :]))
    for items, plain in zip(values, tuples, strict=True):
        assert items == plain and plain == items and repr(items) == repr(plain) and len(items) == len(plain)
        assert items[-2:] == plain[-2:] and items[1:3] == plain[1:3]
        assert [items[place] for place in range(-len(plain), len(plain))] == [*plain, *plain]
        for content in CONTENTS:
            assert items.holds(content) == any(item.content == content for item in plain)


def test_equal_to_nothing_else():
    assert Items() == () and Items() == Items()
    assert Items() != [] and Items((Item("0", "a", 1),)) != Items()
