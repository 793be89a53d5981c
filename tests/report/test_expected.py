"""Bands of published results."""

import numpy as np
import pytest

from memsearcher_jax.config import settings
from memsearcher_jax.launch import cli
from memsearcher_jax.report.expected import Band, CheckedMetric, find_experiment, make_band, read_experiments

PUBLISHED = cli.PRESETS / "published.toml"


def test_a_band_is_the_prediction_interval_of_one_more_seed():
    band = make_band("em", [0.4, 0.5, 0.6])
    assert (band.low, band.high) == pytest.approx(
        (0.5 - 4.303 * 0.1 * (4 / 3) ** 0.5, 0.5 + 4.303 * 0.1 * (4 / 3) ** 0.5), abs=1e-12
    )
    assert make_band("em", [1.0, 1.0, 1.0]) == Band("em", (1.0, 1.0, 1.0), 1.0, 1.0)
    assert make_band("em", [0.99, 1.0, 0.98]).high == 1.0
    rng = np.random.default_rng(0)
    inside = [CheckedMetric(make_band("m", row[:3]), row[3]).inside for row in rng.normal(0.5, 0.01, (2_000, 4))]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("values", [[], [0.5], [0.5] * 9])
def test_a_band_needs_several_seeds(values):
    with pytest.raises(ValueError, match="a band needs the values of two to eight seeds"):
        make_band("em", values)


def test_published_settings_exist_and_their_values_are_those_of_the_documentation():
    text = (cli.PRESETS.parent / "docs" / "learning.md").read_text()
    for experiment in read_experiments(PUBLISHED):
        named = settings(cli.load_preset(experiment.preset))
        assert set(experiment.settings) <= set(named)
        for band in experiment.bands:
            values = [f"{value:.2f}".lstrip("0") for value in band.published]
            assert " ".join(values) in text or all(value in text for value in values)


def test_the_most_specific_experiment_is_chosen():
    experiments = read_experiments(PUBLISHED)
    tiny = settings(cli.load_preset("tiny"))
    assert len(find_experiment(experiments, "tiny", tiny).bands) == 4  # greedy
    sampled = tiny | {"evaluation.temperature": 1.0}
    ablation = find_experiment(experiments, "tiny", sampled | {"rl.credit": "last_context"})
    assert ablation.settings["rl.credit"] == "last_context"
    with pytest.raises(ValueError, match=r"results of tiny are published for evaluation\.temperature 1\.0; "):
        find_experiment(experiments, "tiny", tiny | {"evaluation.temperature": 0.5})
    with pytest.raises(ValueError, match=r"published for preset 'nano': choose from tiny, tiny_memalpha$"):
        find_experiment(experiments, "nano", tiny)
