"""What supervised learning compares when it goes on from a checkpoint."""

from types import SimpleNamespace

import pytest

from memsearcher_jax.config import to_dict, with_settings
from memsearcher_jax.launch import cli
from memsearcher_jax.sft import train


@pytest.mark.parametrize("setting", ["sft.keep", "sft.held_out_share", "training.seq_len"])
def test_a_checkpoint_without_a_checksum_of_its_steps_compares_settings(setting, monkeypatch):
    """As those of 0.3.0 are; later ones of the run have one."""
    begun = cli.load_preset("tiny")
    values = {
        "sft.held_out_share": 0.5,
        "sft.keep": "best",
        "training.seq_len": 4 * begun.training.seq_len,
        "sft.epochs": 9,
    }
    data = SimpleNamespace(steps=1, checksum="of the files", schedule="of the steps")
    monkeypatch.setattr(train, "open_policy", lambda *_: (None, {"trajectories": "of the files", "settings": stored}))
    stored = to_dict(begun)

    def open_with(changes):
        run = SimpleNamespace(config=with_settings(begun, changes), meshes=SimpleNamespace(train=None))
        return train.open_state(run, data, "runs/a")[1]

    assert open_with({"sft.epochs": 9})["schedule"] == "of the steps"
    with pytest.raises(ValueError, match=f"twice and others never .*{setting} from .* to {values[setting]!r}"):
        open_with({setting: values[setting]})
