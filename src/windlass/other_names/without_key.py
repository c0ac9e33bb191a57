"""Words at the top of other tools' files that no single section here answers: several sections have them, nothing needs them,
or what they ask for is not in this version. No torch.

Sources: the argument classes of transformers' Trainer and of LLaMA-Factory, axolotl's configuration schema, torchtune's and
nanoGPT's recipes, torchtitan's job config, LLM Foundry's YAML.
"""

from typing import Final

_NOT: Final = "remove it: this version has no {}".format
# what to write, {} for the value given -> the words for it
# fmt: off
TOP: Final[dict[str, str]] = {
    "run.directory={}": "output_dir out_dir save_folder dump_folder",
    "run.directory": "job",
    "run.steps, run.epochs or run.tokens": "max_duration max_steps_per_epoch",
    "run.tokens_per_step (sequences x data.sequence_length)": "global_train_batch_size",
    "run.micro_batch (validation has the same)": "per_device_eval_batch_size device_eval_batch_size eval_batch_size",
    "run.micro_batch=auto": "auto_find_batch_size",
    "model.from, or model.family with its sizes": "init_from model_flavor",
    "model.num_hidden_layers={}": "n_layer",
    "model.num_attention_heads={}": "n_head",
    "model.hidden_size={}": "n_embd",
    "model.tie_word_embeddings={}": "tie_word_embeddings",
    "data.sources=[{path: {}}], or hub for path": "pretraining_dataset dataset_dir train_loader eval_loader",
    "data.validation={}": "val_set_size",
    "data.sequence_length={}": "max_packed_sequence_len",
    "evaluate.sequences, or fewer rows in the source": "max_samples max_eval_samples",
    "rope_scaling of model, with the fields that transformers gives it": "rope_scaling",
    "model.vocab_size, where it is more than the base has": "resize_token_embeddings resize_token_embeddings_to_32x",
    "parallel.zero and parallel.shard (windlass import reads the file of the other tool)": "deepspeed",
    "parallel.tp={}": "tensor_parallel_dim",
    "parallel.schedule={}": "pipeline_parallel_schedule pipeline_schedule pp_schedule",
    "precision.scaling, with precision.policy=fp8": "fp8_recipe fp8_recipe_name float8_recipe_name",
    "parallel.recompute":
        "enable_activation_checkpointing disable_gradient_checkpointing gradient_checkpointing_kwargs",
    "parallel.blocks_per_unit (a unit is a block)": "custom_sharded_layers",
    "the keys of optim": "optim_args",
    "optim.floor={}": "alpha_f cosine_min_lr_ratio",
    "optim.floor and optim.decay_fraction": "lr_scheduler_kwargs",
    "optim.warmup_steps": "t_warmup",
    "optim.schedule, which may be constant": "decay_lr",
    "remove it: the rate falls until the last step; or use run.steps": "lr_decay_iters",
    "optim.max_norm, for gradient_clipping": "algorithms",
    "checkpoint.every_steps": "save_strategy saves_per_epoch",
    "checkpoint.keep_last={}": "save_num_checkpoints_to_keep",
    "checkpoint.keep_best": "load_best_model_at_end metric_for_best_model greater_is_better",
    "evaluate.every_steps": "evaluation_strategy eval_strategy evals_per_epoch",
    "remove it: validation runs at step 0 and at the end; or use `windlass evaluate RUN`": "eval_first eval_only",
    "`windlass evaluate RUN --tasks FILE`": "icl_tasks",
    "`windlass generate RUN`": "predict_with_generate",
    "wandb in report.sinks": "wandb_log enable_wandb loggers",
    "report.sinks, beside the lines and the page in run.directory": "metric_logger",
    "remove it: run.seed is of the data's order too": "data_seed",
    "model.from for its checkpoint_dir, run.directory for its output_dir": "checkpointer",
    "attn_pdrop, embd_pdrop and resid_pdrop of model.family=gpt2, attention_dropout of others, or adapter.dropout": "dropout",
    "remove it: model.family=gpt2 has biases; or use attention_bias and mlp_bias of a model.family that has these": "bias",
    "report.sinks=[{}]": "report_to",
    "tensorboard in report.sinks": "enable_tensorboard",
    "report.project={}": "wandb_project",
    "the environment variable WANDB_ENTITY": "wandb_entity",
    "run.directory: its name is the run's name": "wandb_run_name wandb_name",
    "report.every_steps": "console_log_interval log_freq",
    "`windlass profile RUN`, while it trains": "profiling enable_profiling profiler",
    "launch.max_restarts": "fault_tolerance",
    "`windlass export RUN --push OWNER/NAME`": "push_to_hub hub_model_id hub_strategy",
    "adapter.targets, which may be all-linear": "apply_lora_to_mlp",
    "adapter.also_train": "apply_lora_to_output",
    "adapter.base=nf4 (four bits; eight are not in this version)": "load_in_8bit quantizer",
    "optim.groups with frozen: true": "freeze_trainable_layers freeze_trainable_modules unfrozen_parameters",
    "the chat template of data.tokenizer.from": "chat_template template",
    "a tokenizer that has them (the page Finetune on chats shows how)": "special_tokens tokens",
    "remove it: every answer of the assistant is learned, and nothing else": "roles_to_train mask_history",
    "remove it: an answer is learned with the end of its turn": "eot_tokens train_on_eot train_on_eos",
    "remove it: model.from and data.tokenizer.from say it": "base_model_config tokenizer_type tokenizer_config model_type",
    "remove it: documents are always packed, and validation as training":
        "eval_sample_packing pad_to_sequence_len pad_to_max_length group_by_length",
    "data.isolate={}": "neat_packing",
    "weight of each entry of data.sources": "mix_strategy interleave_probs",
    "remove it: torch chooses the kernel of attention; the first lines of a run name it":
        "flash_attention flash_attn xformers_attention sdp_attention attn_implementation use_flash_attention_2",
    "remove it: the device, its backend and this rank are found":
        "device backend ddp_backend local_rank use_cpu no_cuda init_device",
    "remove it: code of a hub repository is never run": "trust_remote_code",
    "remove it: prepared data is found again by its fingerprint":
        "overwrite_cache preprocessing_num_workers dataset_processes dataset_num_proc",
    "remove it: the same command resumes; to start over, name another run.directory":
        "overwrite_output_dir autoresume do_train enable_checkpoint always_save_checkpoint",
    "remove it: the report has the curves": "plot_loss log_peak_memory_stats",
    "remove it: a hang is found by its own deadlines": "ddp_timeout dist_timeout comm",
    "remove it: columns that are not named are not read; the last batch is full":
        "remove_unused_columns dataloader_drop_last",
    "remove it: a parameter without a gradient stops the run": "ddp_find_unused_parameters",
    "remove it: a recipe is always checked whole": "strict",
    "--quiet or --json": "python_log_level log_level",
    "remove it: weights are read one rank's part at a time":
        "lora_on_cpu low_cpu_ram low_cpu_mem_usage cpu_ram_efficient_loading fsdp_cpu_ram_efficient_loading",
    "remove it: `windlass export` writes an adapter by itself": "save_adapter_weights_only",
    "remove it: `windlass export` writes safetensors": "save_safetensors",
    "remove it: checkpoints hold the optimizer, so that a run resumes; `windlass export` writes the weights alone":
        "save_only_model",
    "objective.label_smoothing on pairs, and nowhere else (the loss of tokens is not smoothed)":
        "label_smoothing_factor label_smoothing",
    _NOT("noise on embeddings"): "neftune_noise_alpha",
    _NOT("fused kernels of Liger or Unsloth; parallel.compile=true fuses by torch"):
        "use_liger_kernel enable_liger_kernel unsloth use_unsloth use_kernels use_v1_kernels liger_rms_norm liger_rms_norm_gated "
        "liger_glu_activation liger_layer_norm liger_rope liger_cross_entropy liger_fused_linear_cross_entropy cut_cross_entropy "
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel unsloth_cross_entropy_loss",
    "remove it: layouts are FSDP2's, and every rank saves its own part":
        "fsdp_version state_dict_type fsdp_state_dict_type fsdp_final_state_dict_type final_state_dict_type",
    "remove it: a unit is a block": "transformer_layer_cls_to_wrap fsdp_transformer_layer_cls_to_wrap",
    "remove it: models here read text alone": "processor_type processor image_max_pixels video_max_pixels image_size "
                                             "image_resize_algorithm freeze_vision_tower freeze_multi_modal_projector",
    _NOT("stop by the validation loss; checkpoint.keep_best=1 keeps the best"): "early_stopping_patience early_stopping",
    _NOT("shifted sparse attention; parallel.context cuts long sequences"): "s2_attention shift_attn",
    _NOT("optimizers on projected or rotating parameters; adapter.kind=lora has few states"):
        "lisa_n_layers galore_rank use_galore use_badam use_apollo",
    _NOT("activations on the host; parallel.recompute=full keeps none"): "enable_activation_offloading",
    _NOT("loss on the chosen answers beside that of pairs; objective.loss=orpo has one of its own"):
        "dpo_ftx pref_ftx rpo_alpha",
    _NOT("update inside backward; parallel.offload=true keeps states on the host"): "optimizer_in_bwd",
    _NOT("callbacks; on_event of train() sees every line of the log"): "callbacks",
    _NOT("experiments of torchtitan's"): "experimental",
}
# fmt: on
