"""transformers' Trainer for the drafter: features or a live target in, KL out, agreement logged as `acceptance`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vllm_spd.training.features import LengthBatchedSampler
from vllm_spd.training.measure import Measures, hits_and_overlap, speedup
from vllm_spd.training.pdm import PDM, DraftOutput
from vllm_spd.training.target import Target

__all__ = ["NonFiniteLoss", "PDMTrainer"]


class NonFiniteLoss(RuntimeError):
    """The loss or a gradient became NaN or infinite; no checkpoint was written after that."""


class PDMTrainer(Trainer):
    """Trains a PDM on batches of `collate`; asks `target` for hidden states when a batch carries none."""

    control: TrainerControl
    optimizer: torch.optim.Optimizer | None

    def __init__(self, *args: Any, target: Target, layers: Sequence[int], projection_lr: float, **kwargs: Any) -> None:
        """`layers`: hidden states in a batch, the anchors followed by the target's last layer."""
        super().__init__(*args, **kwargs)
        self.target, self.layers, self.projection_lr = target, list(layers), projection_lr
        self.model_accepts_loss_kwargs = False
        self.window = torch.zeros(2)
        self.add_callback(GradientGuard())

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output = self.draft(model, inputs)
        if not torch.isfinite(output.loss):
            raise NonFiniteLoss(
                f"The loss became {output.loss.item()} at step {self.state.global_step}: lower --lr and run the same "
                f"command again to continue from the last good checkpoint in {self.args.output_dir}."
            )
        self.window += torch.stack([output.agreed, output.rows]).float().cpu()
        return (output.loss, output) if return_outputs else output.loss

    def draft(self, model: nn.Module, inputs: dict[str, Any]) -> DraftOutput:
        self.add_features(inputs)
        output: DraftOutput = model(
            anchors=inputs["hidden"][:, :, : len(self.layers) - 1],
            position_ids=inputs["position_ids"],
            loss_mask=inputs["loss_mask"],
            final=inputs["hidden"][:, :, -1][inputs["loss_mask"]],
            target_top1=inputs["top1"],
        )
        return output

    def add_features(self, inputs: dict[str, Any]) -> None:
        """Fill in what a batch without cached features lacks, from one forward of the target."""
        if "hidden" in inputs:
            return
        inputs["hidden"] = self.target.hidden_states(inputs["input_ids"], self.layers)
        teaching = self.target.teach(inputs["hidden"][:, :, -1][inputs["loss_mask"]])
        inputs["top1"], inputs["logsumexp"] = teaching.top1, teaching.logsumexp

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.window[1] > 0:
            logs["acceptance"] = round((self.window[0] / self.window[1]).item(), 4)
            self.window.zero_()
        super().log(logs, *args, **kwargs)

    @torch.no_grad()
    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """Acceptance at temperature 0 and 1 on the held-out samples."""
        measures = self.measure(self.get_eval_dataloader())
        logs = {
            f"{metric_key_prefix}_acceptance": round(measures.acceptance, 4),
            f"{metric_key_prefix}_acceptance_t1": round(measures.sampled_acceptance, 4),
            f"{metric_key_prefix}_speedup": round(speedup(measures.acceptance, self.unwrapped.layout.num_stages), 3),
        }
        self.log(dict(logs))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
        return logs

    @property
    def unwrapped(self) -> PDM:
        model = self.accelerator.unwrap_model(self.model)
        assert isinstance(model, PDM)
        return model

    @torch.no_grad()
    def measure(self, loader: Any) -> Measures:
        """Measures over all batches of a loader, one entry per sequence."""
        model = self.unwrapped
        model.eval()
        measures = Measures()
        for batch in loader:
            inputs = self._prepare_inputs(batch)
            with self.compute_loss_context_manager():
                output = self.draft(model, inputs)
            final = inputs["hidden"][:, :, -1][inputs["loss_mask"]]
            values = hits_and_overlap(model, output.logits, final, inputs["top1"], inputs["logsumexp"])
            lengths = inputs["loss_mask"].sum(1).tolist()
            for hits, overlap in zip(values[0].split(lengths), values[1].split(lengths), strict=True):
                measures.add(hits, overlap)
        model.train()
        return self.summed(measures)

    def summed(self, measures: Measures) -> Measures:
        """The same sums over all processes."""
        sums = torch.tensor([measures.rows, measures.agreed, measures.overlap], dtype=torch.float64)
        rows, agreed, overlap = self.accelerator.reduce(sums.to(self.args.device), "sum").tolist()
        measures.rows, measures.agreed, measures.overlap = int(rows), int(agreed), overlap
        return measures

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        lengths = (train_dataset or self.train_dataset).lengths()
        return LengthBatchedSampler(lengths, self.args.train_batch_size * max(1, self.args.world_size), self.args.seed)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with a rate of its own for the projections; vectors (norms, biases) do not decay."""
        if self.optimizer is None:
            groups: dict[tuple[bool, bool], list[Tensor]] = {}
            for name, parameter in (model or self.model).named_parameters():
                if parameter.requires_grad:
                    groups.setdefault(("aggr_projs" in name, parameter.ndim > 1), []).append(parameter)
            self.optimizer = torch.optim.AdamW(
                [
                    {
                        "params": parameters,
                        "lr": self.projection_lr if projection else self.args.learning_rate,
                        "weight_decay": self.args.weight_decay if decays else 0.0,
                    }
                    for (projection, decays), parameters in groups.items()
                ],
                betas=(self.args.adam_beta1, self.args.adam_beta2),
            )
        return self.optimizer


class GradientGuard(TrainerCallback):
    """Stops before a broken gradient reaches the weights, so that every checkpoint is a good one."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        if not torch.isfinite(torch.stack([gradient.sum() for gradient in gradients]).sum()):
            raise NonFiniteLoss(
                f"A gradient became NaN or infinite at step {state.global_step}: lower --lr and run the same command "
                f"again to continue from the last good checkpoint in {args.output_dir}."
            )
