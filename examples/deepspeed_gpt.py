"""A small GPT learns real text, byte by byte, under DeepSpeed in FP8.

    deepspeed examples/deepspeed_gpt.py --deepspeed_config examples/ds_config.json
    torchrun --nproc_per_node 2 examples/deepspeed_gpt.py --deepspeed_config examples/ds_config.json

Without a GPU: set DS_ACCELERATOR=cpu, and give the launcher `--num_gpus 2` for two processes. FP8 needs two things here: the import of
`ampplug.integrations.deepspeed`, and the block "ampplug" in ds_config.json. The rest is DeepSpeed.
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
import torch.nn.functional as F

import ampplug.integrations.deepspeed  # noqa: F401  (makes DeepSpeed read the "ampplug" block)
from ampplug.demo import data
from ampplug.demo.model import build


def main() -> None:
    """Train, report, and write a checkpoint where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--preset", default="small", help="small, 124m or 1b")
    parser.add_argument("--data", help="a file or folder to learn from; default: the sources of Python's standard library")
    parser.add_argument("--checkpoint", metavar="DIR", help="go on from the newest checkpoint in this folder, if there is one, and write one at the end")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="given by the launcher")
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        # would be compiled at first use, which takes minutes; gloo serves
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()

    torch.manual_seed(0)
    model = build(arguments.preset)
    sequence = model.shape.sequence
    engine, _, _, _ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    corpus = data.load(arguments.data)
    corpus.require(sequence)
    text, rank, batch = corpus.train.to(engine.device), engine.global_rank, engine.train_micro_batch_size_per_gpu()

    if arguments.checkpoint:
        engine.load_checkpoint(arguments.checkpoint)  # scales of FP8 and 8-bit moments come with it
    micro_batches = engine.gradient_accumulation_steps()
    first, last = engine.global_steps * micro_batches, arguments.steps * micro_batches
    for step, starts in enumerate(data.offsets(0, range(first, last), batch * engine.world_size, text.numel(), sequence), first):
        mine = starts.view(engine.world_size, batch)[rank].to(engine.device)
        inputs, targets = data.windows(text, mine, sequence)
        loss = F.cross_entropy(engine(inputs).float().flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        if rank == 0 and (step % 20 == 0 or step == last - 1):
            print(f"step {engine.global_steps}: loss {loss.item():.3f}", flush=True)
    if arguments.checkpoint:
        engine.save_checkpoint(arguments.checkpoint)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
