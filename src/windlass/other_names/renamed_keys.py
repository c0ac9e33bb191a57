"""Words for a setting of ours: keys of a recipe that their name alone keeps from being ours, such as `optim.lr`. No torch.

They are answered with our key, wherever in the recipe they are. Keys whose value decides what to write are in other_names.
"""

from collections.abc import Mapping
from typing import Any, Final

from windlass.other_names.answers import advice, answers
from windlass.other_names.spellings import CONVERTED
from windlass.other_names.without_key import TOP
from windlass.settings import as_yaml

_FAMILY: Final = "model.family={} with its sizes, model.preset or model.from"
_NO_ACCUMULATION: Final = "remove it: accumulation follows from run.tokens_per_step and run.micro_batch"
_COPIES: Final = "parallel.replicate={} parallel.zero=0 (whole copies, DDP) or parallel.shard={} (ZeRO, FSDP)"
# section -> what to write, {} for the value given -> the words for it; "": the recipe itself. A word that two sections have is
# answered in these alone, any other wherever it is.
# fmt: off
NEARLY: Final[dict[str, dict[str, str]]] = {
    "": {
        "the section run": "training train trainer experiment",
        "the section data": "dataset datasets",
        "the section optim": "optimizer optimiser",
        "the section parallel": "distributed parallelism",
        "the section evaluate": "eval evaluation",
        "the section report": "logging log metrics",
        "the section adapter": "lora peft peft_config lora_config",
        **TOP,
    },
    "run": {
        "run.directory={}": "output_dir out_dir save_dir run_dir work_dir dir path output name run_name",
        "run.steps={}": "max_steps num_steps total_steps train_steps training_steps max_iters train_iters iterations duration",
        "run.epochs={}": "num_epochs max_epochs num_train_epochs",
        "run.tokens={}": "max_tokens total_tokens train_tokens num_tokens",
        "run.tokens_per_step (sequences x data.sequence_length)": "batch_size global_batch_size train_batch_size batch",
        "run.micro_batch={}": "micro_batch_size per_device_train_batch_size device_batch_size device_train_microbatch_size "
                              "local_batch_size",
        "run.seed={}": "random_seed manual_seed",
        "remove it: the same command resumes; or use run.start_from for another run's weights":
            "resume resume_from resume_from_checkpoint auto_resume load_from load_path",
        _NO_ACCUMULATION: "gradient_accumulation_steps gradient_accumulation grad_accum accumulation accumulate_grad_batches",
    },
    "model": {
        "model.from={}": "name path repo hf_model model_name model_path name_or_path model_name_or_path base_model pretrained "
                         "pretrained_model_name_or_path",
        _FAMILY: "type kind arch architecture",
        "model.hidden_size={}": "dim d_model embed_dim hidden_dim width",
        "model.num_hidden_layers={}": "layers num_layers n_layers depth num_blocks",
        "model.num_attention_heads={}": "heads num_heads n_heads attention_heads",
        "model.num_key_value_heads={}": "kv_heads num_kv_heads n_kv_heads num_query_groups",
        "model.intermediate_size={}": "ffn_dim d_ff ffn_hidden_size mlp_dim",
        "model.vocab_size={}": "vocab vocabulary_size num_embeddings",
        "model.max_position_embeddings={}": "max_seq_len max_position context_length",
        "preset, from or family of model": "flavor",
        "data.tokenizer={from: {}}": "tokenizer_path",
        "intermediate_size of model, hidden_size times that": "expansion_ratio",
        "remove it: the device is found": "init_device",
        "the fields of attention, beside the others of model": "attn_config",
        "precision.policy={}": "dtype torch_dtype",
        "model.tie_word_embeddings={}": "weight_tying tie_weights tie_embeddings tied_embeddings",
    },
    "data": {
        "data.sequence_length={}": "seq_len seq_length sequence_len max_sequence_length context_length block_size context",
        "data.sources=[{path: {}}], or hub for path": "path paths dataset datasets dataset_name dataset_path data_path name "
                                                      "source train files train_files",
        "data.validation={}": "val validation_split val_split val_size eval test_size",
        "data.tokenizer={from: {}}": "tokenizer_name tokenizer_path tokenizer_name_or_path",
        "data.directory={}": "output_dir dir prepared_path dataset_prepared_path cache_dir",
        "remove it: shards are read as they are needed; or use data.order.first_epoch=written to train while data is prepared":
            "streaming stream",
        "data.shuffle_window, in shards (the stream is always shuffled)":
            "shuffle shuffle_buffer_size buffer_size shuffle_merged_datasets",
        "text of an entry of data.sources": "text_column text_field text_key content_key dataset_text_field",
        "remove it: batches are read ahead by a thread of each rank": "num_workers dataloader_num_workers prefetch_factor",
    },
    "data.sources": {
        "path: {}": "url file files glob data_files dataset_path",
        "hub: {}": "dataset repo hf hf_name",
        "subset: {}": "config config_name dataset_config",
        "text: {}": "column field key text_column text_field text_key",
        "format: {}": "type kind",
        "weight: {}": "share proportion probability ratio mix",
    },
    "data.tokenizer": {"from: {}": "name path name_or_path hub repo"},
    "parallel": {
        "parallel.tp={}": "tensor tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size "
                          "model_parallel_size",
        "parallel.pp={}": "pipeline pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
                          "pipeline_model_parallel_size pp_size stages",
        _COPIES: "data data_parallel data_parallel_size data_parallel_degree dp dp_size",
        "parallel.replicate={}": "data_parallel_replicate_degree dp_replicate dp_replicate_size ddp_size",
        "parallel.shard={}": "data_parallel_shard_degree dp_shard dp_shard_size fsdp_size sharding shards",
        "remove it: parallel.tp brings sequence parallelism along; parallel.context={} cuts long sequences":
            "sequence sequence_parallel sp",
        "parallel.context={}": "cp cp_size context_parallel context_parallel_size context_parallel_degree sequence_parallel_size "
                               "sp_size ulysses_size",
        "parallel.expert={}": "ep ep_size expert_parallel expert_parallel_size expert_parallel_degree "
                              "expert_model_parallel_size experts",
        "parallel.recompute={}": "remat activation_checkpoint activation_recomputation recompute_granularity checkpointing",
        "parallel.compile={}": "torch_compile compiled",
        "parallel.async_tp={}": "enable_async_tensor_parallel",
        "the command: windlass train RECIPE --nproc {} (all visible GPUs without it; parallel divides them)":
            "gpus num_gpus n_gpus ngpus gpu_count devices num_devices world_size nproc nproc_per_node num_processes ranks",
        "the command: windlass launch nodes RECIPE --nodes {} (or launch slurm)": "nodes num_nodes nnodes num_machines hosts",
        "remove it: the device is found": "accelerator device backend",
    },
    "optim": {
        "optim.learning_rate={}": "lr learningrate max_lr base_lr peak_lr step_size",
        "optim.warmup_steps={}": "warmup num_warmup_steps warmup_iters lr_warmup_steps lr_warmup_iters warmup_step",
        "optim.warmup_steps, that share of the run's steps": "warmup_ratio warmup_fraction",
        "optim.schedule={}": "scheduler lr_scheduler lr_schedule lr_scheduler_type lr_decay_style decay_type",
        "optim.floor, as a share of optim.learning_rate": "min_lr final_lr eta_min",
        "optim.floor={}": "min_lr_ratio min_lr_factor min_lr_rate",
        "optim.kind={}": "name type optimizer optimizer_type",
        "optim.beta1 and optim.beta2": "betas",
        "optim.beta1={}": "adam_beta1 b1",
        "optim.beta2={}": "adam_beta2 b2",
        "optim.epsilon={}": "eps adam_eps adam_epsilon",
        "optim.weight_decay={}": "wd decay l2",
        "optim.max_norm={}": "grad_clip clip clip_grad max_grad_norm grad_clip_norm clip_grad_norm gradient_clip_val "
                             "gradient_clipping",
        "optim.kernel=fused": "fused",
    },
    "optim.schedule": {  # a section of other tools: what their schedule's keys are in ours
        "optim.schedule={}": "name type",
        "optim.schedule={} (wsd beside a decay_ratio)": "decay_type",
        "optim.schedule=wsd optim.decay_fraction={}": "decay_ratio",
        "optim.decay_fraction, that share of the run's steps": "num_decay_steps decay_steps lr_decay_steps",
        "optim.schedule, which has no restarts": "num_cycles",
    },
    "checkpoint": {
        "checkpoint.every_steps={}":
            "save_steps save_every checkpoint_every save_interval interval steps every frequency save_freq",
        "checkpoint.keep_last={}": "save_total_limit keep max_to_keep keep_latest_k",
        "remove it: checkpoints are in run.directory": "dir folder path save_dir",
    },
    "evaluate": {
        "evaluate.every_steps={}": "eval_steps eval_every validate_every eval_interval interval steps every frequency",
        "evaluate.sequences={}": "samples num_samples",
        "evaluate.sequences, that number times the sequences of a batch":
            "batches num_batches eval_iters limit_val_batches eval_batches val_batches",
        "run.micro_batch (validation has the same)": "batch_size eval_batch_size per_device_eval_batch_size",
    },
    "report": {
        "report.every_steps={}": "logging_steps log_every log_interval log_every_n_steps interval steps every frequency",
        "report.sinks=[{}]": "to report_to reporters sink",
        "report.sinks=[wandb]": "wandb",
        "report.sinks=[tensorboard]": "tensorboard",
        "report.sinks=[trackio]": "trackio",
    },
    "hub": {"hub.cache={}": "cache_dir home hf_home"},
}
# fmt: on


_SECTION: Final = "the section "
_HERE_ALONE: Final = (("evaluate", "batch_size"),)
"""(section, word): elsewhere the word is another section's."""
_TEXTS: Final = ("model.from", "model.family", "model.tie_word_embeddings")
"""A model's settings that are no whole numbers."""
_WITHIN: Final = {"optim.schedule": "lr_scheduler scheduler lr_scheduler_kwargs lr_schedule"}
"""Place of ours -> sections of other tools whose keys are all settings there."""
_FILE_FORMATS: Final = ("jsonl", "json", "csv", "tsv", "parquet", "arrow", "mds", "megatron", "bin")


def renamed_key_advice(section: str, key: str, value: Any) -> str:
    """'use ...; ' for a `key` that `section` does not have; '' where it is no word for a key of that section."""
    word = key.lower().replace("-", "_")
    if section == "data.sources" and word in ("type", "kind") and value in _FILE_FORMATS:
        return f"use file_format: {value}; "
    rows = (ours for ours, words in NEARLY.get(section, {}).items() if word in words.split())
    return next((f"{advice(_filled(ours, value))}; " for ours in rows), "")


def named_section(key: str) -> str:
    """Our section for another tool's of this name, such as `training`, or the key for what it has as a section; '' where there
    is none."""
    within = (ours for ours, words in _WITHIN.items() if key in words.split())
    rows = NEARLY[""].items()
    return next(
        within, next((ours[len(_SECTION) :] for ours, words in rows if key in words.split() and _SECTION in ours), "")
    )


def _filled(ours: str, value: Any) -> str:
    """A row's answer with the value as our key has it; without one of a section, which is no value of a single key."""
    named = ours.partition("=")[0]
    converted = CONVERTED.get(named, lambda one: one)(value)
    if isinstance(converted, Mapping) and "={}" in ours:
        return f"{ours.replace('={}', '')} for what it says (windlass keys {named.partition('.')[0]})"
    if isinstance(converted, Mapping | list) and ": {}" in ours:
        return f"{named}, whose keys are others (windlass keys {named})"
    if named.startswith("model.") and named not in _TEXTS and "={}" in ours and type(converted) is not int:
        return ours.replace("={}", " (a whole number)")
    return ours.replace("{}", as_yaml(converted))


def renamed_elsewhere(key: str, value: Any) -> str:
    """What to write for a word that belongs to one other section and no more; else ''."""
    sections = [one for one in NEARLY if "." not in one and (one, key) not in _HERE_ALONE]
    found = {answer for section in sections if (answer := renamed_key_advice(section, key, value))}
    found |= {f"{advice(ours)}; " for ours in answers(key, value)}
    return found.pop() if len(found) == 1 else ""
