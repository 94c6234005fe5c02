"""speculators' own program on a machine without a GPU: three substitutions from outside, none in data or model code, and its plain forms of attention
and loss where none is asked for (the default ones need a GPU).

    python speculators_on_cpu.py train …          as `speculators train`, with the backend `statetap` known to it
"""
import sys

import statetap.speculators  # noqa: F401
import torch


def train(arguments):
    import speculators.train.cli as cli
    import speculators.train.trainer as trainer
    from speculators.train.config import TrainConfig

    class CpuTrainer(cli.Trainer):
        def setup_trainer(self):
            super().setup_trainer()
            self.device_type = "cpu"

    for option in ("--draft-attn-impl", "--loss-implementation"):
        if option not in arguments:
            arguments = [*arguments, option, "eager"]
    trainer.get_local_rank = lambda *_, **__: torch.device("cpu")
    cli.Trainer = CpuTrainer
    torch.accelerator.synchronize = lambda *_, **__: None
    cli.main(TrainConfig.resolve(arguments))


if __name__ == "__main__":
    assert sys.argv[1] == "train"
    train(sys.argv[2:])
