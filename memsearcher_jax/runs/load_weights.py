"""Loads and exports weights: from a Hugging Face directory, or the newest checkpoint of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from memsearcher_jax.config import RunConfig
from memsearcher_jax.model import lora, sharding, weights
from memsearcher_jax.model.config import MeshConfig, ModelConfig
from memsearcher_jax.runs import hub
from memsearcher_jax.runs.export_settings import EXPORT_FILE, read_export_config
from memsearcher_jax.runs.inputs import read_inputs, weights_hash
from memsearcher_jax.runs.run_dir import checkpoints_of, is_run, located, read_run_config
from memsearcher_jax.training import checkpoint
from memsearcher_jax.training.params_reader import ParamsReader

LORA_FIELDS = ("lora_rank", "lora_alpha", "lora_targets")


def check_weights(folder: str | Path, model: ModelConfig) -> None:
    """Raises ValueError or OSError, in one line, unless the directory is complete and holds this model.

    Reads no weights but those of `model.adapter`, and samples of those that a LoRA run was trained from.
    """
    if model.adapter:
        load_adapters(model)
    if not is_run(folder):
        folder = located(folder)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{folder} is neither a run (no run.json) nor a Hugging Face model (no config.json); adapters go to "
                "--model.adapter, GGUF files to launch/import_gguf.py"
            )
        exported = model.adapter and (folder / EXPORT_FILE).is_file()
        if exported and read_export_config(folder).model.adapter == model.adapter:
            raise ValueError(f'{folder} contains the adapters {model.adapter} already: set model.adapter to ""')
        weights.check_same_model(folder, model, weights.read_config(folder))
        weights.check_files(folder)
        return
    trained = trained_model(folder)
    weights.check_same_model(folder, model, trained)
    if model.adapter and model.adapter == trained.adapter:
        raise ValueError(
            f'{folder} was trained from the adapters {model.adapter} and contains them: set model.adapter to ""'
        )
    if trained.lora_rank:
        check_weights(trained.path, replace(trained, adapter=""))
        earlier = read_inputs(Path(folder)).hashes.get("model.path")
        if earlier and not is_run(trained.path) and weights_hash(trained.path) != earlier:
            raise ValueError(f"{trained.path} has changed since {folder} was trained from it: restore it")
    if newest_step(folder) is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint yet: resume that run, or choose other weights")


def newest_step(folder: str | Path) -> int | None:
    """The step of the newest checkpoint of a run; None for other weights, and for a run without a checkpoint."""
    return checkpoint.latest_step(checkpoints_of(folder)) if is_run(folder) else None


def load_params(folder: str | Path, model: ModelConfig, mesh: Mesh, dtype: str, step: int | None = None) -> dict:
    """The weights on `mesh` as `dtype`; of a run those of `step`, by default the newest.

    Adapters are merged: those of a LoRA run, and those in `model.adapter` unless they are trained further.
    Raises ValueError or OSError in one line.
    """
    if is_run(folder):
        params = _load_run(folder, model, mesh, dtype, step)
    else:
        params = weights.load(located(folder), mesh=mesh, dtype=dtype)[1]
    if model.adapter and not model.lora_rank:
        found, adapters = load_adapters(model, mesh)
        params = _merge(params, adapters, found, mesh)
    return params


def load_adapters(model: ModelConfig, mesh: Mesh | None = None) -> tuple[ModelConfig, dict]:
    """The model config with their rank, alpha and targets, and the adapters in `model.adapter` on `mesh`.

    Without a mesh the adapters stay on the host. Raises ValueError or OSError in one line, also if `model.lora_rank`
    trains adapters of another kind.
    """
    found, adapters = lora.read_adapters(located(model.adapter), model)
    for name in LORA_FIELDS if model.lora_rank else ():
        trained = getattr(model, name)
        stored = getattr(found, name)
        if trained != stored:
            raise ValueError(
                f"model.{name} is {trained}, and {stored} in model.adapter {model.adapter}: set it to that"
            )
    if mesh is None:
        return found, adapters
    targets = sharding.abstract_arrays(lora.adapter_specs(found), mesh)
    return found, jax.tree.map(
        lambda x, target: jax.make_array_from_callback(x.shape, target.sharding, x.__getitem__), adapters, targets
    )


def trained_model(folder: str | Path) -> ModelConfig:
    """The model config of a run, with local paths."""
    return hub.local(RunConfig(model=read_run_config(folder).model)).model


def teacher_model(config: RunConfig) -> ModelConfig:
    """The model in teacher.path, computed as the policy is. Reads no weights. Raises ValueError or OSError."""
    path = config.teacher.path
    policy = config.model
    model = trained_model(path) if is_run(path) else weights.read_config(located(path))
    if model.max_positions < config.sampling.context_tokens:
        raise ValueError(
            f"teacher.path {path} has {model.max_positions} positions and sampling.context_tokens is "
            f"{config.sampling.context_tokens}: choose another teacher, or lower it"
        )
    own = {"compute_dtype": policy.compute_dtype, "attention": policy.attention, "remat": policy.remat}
    return replace(model, path="", adapter="", lora_rank=0, **own)


def export_adapters(folder: str | Path, out: Path, dtype: str = "float32") -> str:
    """Writes the adapters of a LoRA run to `out`, in PEFT's format, and returns the name of the base model.

    Raises ValueError or OSError in one line.
    """
    trained = read_run_config(folder).model if is_run(folder) else ModelConfig()
    if not trained.lora_rank:
        raise ValueError(f"{folder} has no adapters: it trained all weights; export it without --adapter")
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1), jax.local_devices()[:1])
    target = sharding.abstract_arrays(lora.adapter_specs(trained), mesh)
    adapters = checkpoint.restore_params(checkpoints_of(folder), trained, target)
    base = trained.path
    revision = ""
    if hub.is_repository(base):
        base, _, revision = base.partition("@")
    lora.write_adapters(out, trained, jax.device_get(adapters), base, dtype, revision)
    return base


def _load_run(folder: str | Path, model: ModelConfig, mesh: Mesh, dtype: str, step: int | None) -> dict:
    checkpoints = checkpoints_of(folder)
    trained = trained_model(folder)
    model = replace(model, adapter="", **{name: getattr(trained, name) for name in LORA_FIELDS})
    target = sharding.abstract_arrays(lora.trainable_specs(model), mesh, None if model.lora_rank else dtype)
    params = checkpoint.restore_params(checkpoints, model, target, step)
    if not model.lora_rank:
        return params
    source = checkpoint.run_meta(checkpoints, model, step).get("initial_step")
    return _merge(load_params(trained.path, model, mesh, dtype, source), params, model, mesh)


def _merge(base: dict, adapters: dict, model: ModelConfig, mesh: Mesh) -> dict:
    """The weights with the adapters added; `base` is donated."""
    shardings = sharding.param_shardings(model, mesh)
    return jax.jit(lora.merge, static_argnums=2, donate_argnums=0, out_shardings=shardings)(base, adapters, model)


def export(model: ModelConfig, out: Path, dtype: str, tokenizer: str, end_ids: Sequence[int]) -> None:
    """Writes the weights in `model.path` to `out`, a Hugging Face directory, with the tokenizer in `tokenizer`.

    The weights of a run are copied one tensor at a time, unless adapters are merged into them.
    Raises ValueError or OSError in one line.
    """
    folder = model.path
    model = replace(model, param_dtype=dtype)
    has_all_weights = is_run(folder) and not read_run_config(folder).model.lora_rank
    if has_all_weights and not model.adapter:
        saved = ParamsReader(checkpoints_of(folder), model)
        weights.save_streamed(out, model, saved.read, tokenizer, end_ids=end_ids, verify=saved.check)
    else:
        mesh = sharding.make_mesh(MeshConfig(1, 1, 1), jax.local_devices()[:1])
        params = load_params(folder, replace(model, lora_rank=0), mesh, dtype)
        weights.save(out, model, params, tokenizer, end_ids=end_ids)
