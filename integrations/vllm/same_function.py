"""What vLLM can be configured with that leaves KV the function that its description names (rule R16).

Beside `proven_out.py`, whose fields change no byte. These may change where numbers are rounded, as
another TP size does, and not what is computed: an engine of which nothing else is set shares pages with
every engine of the same model. A field that is on neither list counts, whatever its value. A test
(`test_engine_fields.py`) fails for a field of the installed vLLM that is on no list at all.
"""

from typing import Final

from ..sharing import Reasons

_CONFIG: Final = "vllm.config"
_DESCRIBED: Final = "It follows from the model's own configuration, which the description has."
_OFF: Final = (
    "By default it is off or the model's own; what else it may say is another computation."
)
_ROUNDING: Final = "It chooses kernels or how they are compiled: the same sums in another order."
_STATES: Final = "Of recurrent states; pages that have some are not shared with other engines."

AT_ANY_VALUE: Final[Reasons] = {
    f"{_CONFIG}.vllm.VllmConfig": {
        "device_config kernel_config mamba_config optimization_level performance_mode": _ROUNDING,
        "weight_transfer_config": "How new weights come, which need a version of their own.",
        "aux_output_config": "What is sent back beside tokens.",
    },
    f"{_CONFIG}.attention.AttentionConfig": {
        "backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version": _ROUNDING,
        "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv": _ROUNDING,
        "tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend": _ROUNDING,
        "sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m": _ROUNDING,
        "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size": _ROUNDING,
        "indexer_tp_shard_min_rows": "Which rank scores which rows of an index.",
    },
    f"{_CONFIG}.cache.CacheConfig": {
        "block_size": "The page has it, and the description the page.",
        "user_specified_block_size _block_size_resolved prefix_match_unit hash_block_size": (
            "How blocks are found on the device."
        ),
        "effective_attention_block_size cache_hit_alignment_tokens": "As above.",
        "is_attention_free sliding_window": _DESCRIBED,
        "mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_dtype": _STATES,
        "mamba_ssm_cache_dtype mamba_cache_mode enable_mamba_shared_prefix_checkpoint": _STATES,
        "replayssm_buffer_len use_replayssm use_kda_recoverssm swa_bounded_replay": _STATES,
    },
    f"{_CONFIG}.compilation.CompilationConfig": {
        "mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder": _ROUNDING,
        "cudagraph_mm_encoder encoder_cudagraph_token_budgets compile_sizes": _ROUNDING,
        "encoder_cudagraph_max_vision_items_per_batch inductor_compile_config": _ROUNDING,
        "encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay cudagraph_mode": _ROUNDING,
        "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold": _ROUNDING,
        "cudagraph_copy_inputs cudagraph_specialize_lora use_inductor_graph_partition": _ROUNDING,
        "pass_config dynamic_shapes_config fast_moe_cold_start": _ROUNDING,
    },
    f"{_CONFIG}.lora.LoRAConfig": {
        "max_lora_rank fully_sharded_loras specialize_active_lora": (
            "Nothing, without an adapter. An adapter that they may change counts with them."
        ),
    },
    f"{_CONFIG}.model.ModelConfig": {
        "dtype": "The description has it.",
        "hf_config hf_text_config attention_chunk_size hf_image_processor_config": _DESCRIBED,
        "word_embeddings_untied_by_checkpoint model_arch_config encoder_config": _DESCRIBED,
        "_architecture _model_info _hf_config_revision config_updated convert_type": _DESCRIBED,
        "_supports_multimodal_inputs_cache runner_type": _DESCRIBED,
        "max_model_len": (
            "It bounds prompts. Where it picks what positions are, their kind is not proven."
        ),
        "enforce_eager disable_cascade_attn": _ROUNDING,
        "enable_prompt_embeds": "Requests that use it are not cached.",
    },
    f"{_CONFIG}.parallel.ParallelConfig": {
        "is_moe_model": _DESCRIBED,
        "all2all_backend disable_nccl_for_dp_synchronization dcp_comm_backend ubatch_size": (
            "How ranks exchange and overlap what each has."
        ),
        "dbo_decode_token_threshold dbo_prefill_token_threshold enable_ep_weight_filter": "As above.",
        "eplb_config enable_eplb enable_expert_parallel expert_placement_strategy": (
            "Which rank has which expert; an expert is the same wherever it is."
        ),
        "elastic_ep_max_dp_size": "As above.",
    },
    f"{_CONFIG}.scheduler.SchedulerConfig": {
        "enable_chunked_prefill disable_chunked_mm_input disable_hybrid_kv_cache_manager": (
            "They say which tokens share a pass, and how memory is divided."
        ),
    },
}

BY_DEFAULT: Final[Reasons] = {
    f"{_CONFIG}.vllm.VllmConfig": {
        "model_config cache_config parallel_config scheduler_config load_config": (
            "They are looked into."
        ),
        "attention_config lora_config compilation_config ec_manager_config": "As above.",
        "engram_config speculative_config diffusion_config quant_config additional_config": _OFF,
    },
    f"{_CONFIG}.attention.AttentionConfig": {
        "disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype": _OFF,
        "indexer_sparse_logits hisparse_config use_non_causal trtllm_ragged_backend": _OFF,
        "minimax_m3_indexer_cp": _OFF,
    },
    f"{_CONFIG}.cache.CacheConfig": {
        "cache_dtype kv_cache_dtype_skip_layers kv_sharing_fast_prefill": _OFF,
    },
    f"{_CONFIG}.compilation.CompilationConfig": {"inductor_passes": _OFF},
    f"{_CONFIG}.ec_manager_config.EncoderCacheManagerConfig": {
        "encoder_cache_manager_cls manager_config": _OFF,
    },
    f"{_CONFIG}.load.LoadConfig": {
        "load_format model_loader_extra_config ignore_patterns": _OFF,
    },
    f"{_CONFIG}.lora.LoRAConfig": {
        "target_modules default_mm_loras enable_tower_connector_lora max_lora_cls_labels": _OFF,
        "enable_mixed_moe_lora_format enable_moe_shared_loras": _OFF,
    },
    f"{_CONFIG}.model.ModelConfig": {
        "runner convert trust_remote_code is_submodel_config code_revision quantization": _OFF,
        "spec_target_max_model_len quantization_config allow_deprecated_quantization": _OFF,
        "enable_trace_replay disable_sliding_window config_format model_class_overrides": _OFF,
        "model_impl pooler_config multimodal_config": _OFF,
    },
    f"{_CONFIG}.parallel.ParallelConfig": {
        "pipeline_parallel_size prefill_context_parallel_size data_parallel_size": _OFF,
        "enable_hc_sp enable_batch_sharded_sampling enable_elastic_ep enable_dbo": _OFF,
        "worker_extension_cls decode_context_parallel_size dcp_kv_cache_interleave_size": _OFF,
        "dcp_q_replicate cp_kv_cache_interleave_size": _OFF,
        "_allow_auto_resolve_cp_interleave_size": _OFF,
    },
    f"{_CONFIG}.scheduler.SchedulerConfig": {
        "runner_type is_multimodal_model scheduler_cls": _OFF,
    },
}
"""Objects of these classes are looked into, and any other one counts."""

WORKERS: Final = frozenset(
    {
        "auto",
        "vllm.v1.worker.cpu_worker.CPUWorker",
        "vllm.v1.worker.gpu_worker.Worker",
        "vllm.v1.worker.xpu_worker.XPUWorker",
    }
)
"""vLLM's own classes of workers (`ParallelConfig.worker_cls`); others may do anything."""

VARIABLES: Final = {
    "VLLM_SSM_CONV_STATE_LAYOUT": _STATES,
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_USE_FLASHINFER_SAMPLER": _ROUNDING,
    "VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG CMAKE_BUILD_TYPE": (
        "They say where it was built and with what."
    ),
    "VLLM_DOCKER_BUILD_CONTEXT VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION CUDA_HOME": "As above.",
    "NVCC_THREADS VERBOSE VLLM_USE_PRECOMPILED": "As above.",
}
"""Variables that are neutral where they are set; any other one that is set counts."""
