"""A hundred keys of other tools, as their files have them, are answered: by our key, or by what this version does instead."""

import re

import pytest

from tests.other_names.test_renamed_keys import answers_to

FOREIGN = {  # tool -> its keys as its files have them at their top, none of which is a key of ours
    "transformers": (
        "output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps "
        "lr_scheduler_type warmup_ratio save_strategy eval_strategy eval_steps save_total_limit group_by_length "
        "report_to load_best_model_at_end push_to_hub resume_from_checkpoint torch_compile neftune_noise_alpha "
        "deepspeed dataloader_num_workers use_liger_kernel bf16 max_grad_norm"
    ),
    "axolotl": (
        "base_model datasets val_set_size sequence_len sample_packing pad_to_sequence_len lora_r lora_target_linear "
        "micro_batch_size load_in_8bit flash_attention wandb_project saves_per_epoch special_tokens chat_template "
        "early_stopping_patience roles_to_train"
    ),
    "LLaMA-Factory": (
        "model_name_or_path finetuning_type lora_target template cutoff_len max_samples overwrite_cache flash_attn "
        "neat_packing freeze_trainable_layers use_unsloth use_galore plot_loss ddp_timeout pref_beta quantization_bit"
    ),
    "torchtune": (
        "enable_activation_checkpointing enable_activation_offloading optimizer_in_bwd custom_sharded_layers "
        "apply_lora_to_mlp metric_logger clip_grad_norm low_cpu_ram device tensor_parallel_dim"
    ),
    "torchtitan": ("job metrics profiling comm float8 fault_tolerance experimental"),
    "LLM Foundry": (
        "max_duration global_train_batch_size device_train_microbatch_size save_folder save_num_checkpoints_to_keep "
        "train_loader algorithms console_log_interval callbacks loggers alpha_f t_warmup autoresume icl_tasks "
        "eval_first dist_timeout"
    ),
    "nanoGPT": (
        "out_dir eval_interval eval_only init_from wandb_log block_size n_layer n_head n_embd max_iters grad_clip "
        "decay_lr warmup_iters lr_decay_iters min_lr backend dtype"
    ),
}


@pytest.mark.parametrize("tool", FOREIGN)
def test_keys_of_other_tools_are_answered_at_the_top_of_a_recipe(tool):
    """Each with what to write, or with what this version does in its place."""
    for key in FOREIGN[tool].split():
        said = " ".join(error.change for error in answers_to([f"{key}=true"]).values())
        assert re.search(r"\buse (?!the keys)|remove it: ", said), (key, said)


def test_what_is_not_in_this_version_is_named():
    (error,) = answers_to(["neftune_noise_alpha=5"]).values()
    assert error.change.startswith("remove it: this version has no noise on embeddings; ")


SAID = {
    "eval_iters=200": "use evaluate.sequences, that number times the sequences of a batch; ",
    "limit_val_batches=0.5": "use evaluate.sequences, that number times the sequences of a batch; ",
    "evaluate.batches=10": "use evaluate.sequences, that number times the sequences of a batch; ",
    "evaluate.samples=10": "use evaluate.sequences=10; ",
    "min_lr_ratio=0.1": "use optim.floor=0.1; ",
    "save_safetensors=true": "remove it: `windlass export` writes safetensors; ",
    "save_only_model=true": "remove it: checkpoints hold the optimizer, so that a run resumes; `windlass export` writes ",
    "lr_scheduler_kwargs=x": "use optim.floor and optim.decay_fraction; ",
    "ddp_backend=nccl": "remove it: the device, its backend and this rank are found; ",
    "peft_config={r: 8}": "use the section adapter: for r use adapter.kind=lora adapter.rank=8; ",
    "unsloth=true": "remove it: this version has no fused kernels of Liger or Unsloth; ",
    "tie_word_embeddings=true": "use model.tie_word_embeddings=true; ",
    "weight_tying=false": "use model.tie_word_embeddings=false; ",
    "lora_on_cpu=true": "remove it: weights are read one rank's part at a time; ",
    "shuffle_merged_datasets=false": "use data.shuffle_window, in shards (the stream is always shuffled); ",
    "dpo_ftx=1": "remove it: this version has no loss on the chosen answers beside that of pairs; ",
    "neat_packing=true": "use data.isolate=true; ",
    "parallel.pipeline_parallel_schedule=1f1b": "use parallel.schedule=1f1b; ",
    "parallel.enable_async_tensor_parallel=true": "use parallel.async_tp=true; ",
    "precision.fp8_recipe=rowwise": "use precision.scaling, with precision.policy=fp8; ",
}


@pytest.mark.parametrize("override", SAID)
def test_keys_that_had_no_answer_or_one_in_another_unit(override):
    """Batches were answered with as many sequences."""
    (error,) = answers_to([override]).values()
    assert error.change.startswith(SAID[override]), error.change
