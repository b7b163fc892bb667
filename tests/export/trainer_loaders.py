"""Run by the trainers' own Python: loads an export with the trainer's published code and prints what it found as JSON.

Usage: trainer_loaders.py NAME ARGUMENT…
"""

import json
import sys


def specforge(path: str, max_length: str) -> list:
    """Pre-tokenized prompts with the filter of the DFlash provider."""
    from specforge.data.loss_mask import has_consecutive_supervised_tokens
    from specforge.data.prompt_builder import prepare_prompt_tasks

    tasks = prepare_prompt_tasks(
        path,
        None,
        chat_template=None,
        max_length=int(max_length),
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
        min_loss_tokens=2,
        loss_mask_filter=has_consecutive_supervised_tokens,
    )
    return [task["payload"] for task in tasks]


def specforge_raw(path: str, tokenizer: str) -> list:
    """Raw conversations through the tokenizer's own template."""
    from specforge.data.prompt_builder import prepare_prompt_tasks
    from transformers import AutoTokenizer

    tasks = prepare_prompt_tasks(
        path,
        AutoTokenizer.from_pretrained(tokenizer),
        chat_template="qwen3.5",
        max_length=4096,
        is_preformatted=False,
        train_only_last_turn=True,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
    )
    return [task["payload"] for task in tasks]


def speculators(path: str, model: str, seq_length: str) -> dict:
    """`prepare-data` without a render endpoint: rows pass through as they are."""
    from speculators.data_generation.preprocessing import load_and_preprocess_dataset

    dataset, _ = load_and_preprocess_dataset(model, [path], seq_length=int(seq_length), build_dataset_num_proc=1)
    return {"features": str(dataset.features), "rows": dataset.with_format(None).to_list()}


def speculators_prepared(path: str) -> dict:
    """The training data set class on a prepared folder."""
    from speculators.train.data import ArrowDataset

    dataset = ArrowDataset(8192, path, on_missing="skip")
    return {
        "features": str(dataset.data.features),
        "lengths": [int(n) for n in dataset.approx_lengths],
        "rows": dataset.data.with_format(None).to_list(),
    }


if __name__ == "__main__":
    print("\n" + json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
