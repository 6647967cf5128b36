"""Which of the engine's paths change it, or lay it open, for everybody: they need the admin scope.

The list is read from the routes of vLLM 0.32.0 and SGLang 0.5.23; where SGLang asks for its own admin key, so
do we. Prefixes, so that variants of a path that a later version adds are kept as well.
"""

import posixpath

_PREFIXES = (
    # caches and memory
    "/reset_",
    "/flush_cache",
    "/clear_hicache",
    "/hicache/",
    "/sleep",
    "/wake_up",
    "/release_",
    "/resume",
    "/freeze_gc",
    # other people's requests
    "/pause",
    "/continue_generation",
    "/abort_request",
    "/inference/v1/abort_request",
    "/slow_down",
    # weights and adapters
    "/init_weight",
    "/update_weight",
    "/begin_weight",
    "/start_weight",
    "/start_draft_weight",
    "/finish_weight",
    "/end_weight",
    "/send_weight",
    "/destroy_weight",
    "/shutdown_weight",
    "/get_weights_by_name",
    "/weight_checker",
    "/weights_checker",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/adapters",
    "/add_external_corpus",
    "/remove_external_corpus",
    "/list_external_corpora",
    # the process and its peers
    "/collective_rpc",
    "/run_script",
    "/set_internal_state",
    "/dumper/",
    "/set_trace_level",
    "/configure_logging",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/pd_role_switch",
    "/fault_tolerance/",
    "/remote_instance_transfer_engine_info",
    "/get_remote_instance_transfer_engine_info",
    "/kv_event_sources",
    "/server_info",
    "/get_server_info",
    "/start_profile",
    "/stop_profile",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
)


def is_engine_admin(path: str) -> bool:
    """Whether a decoded path is one of them, or would be once somebody tidied it up (`//sleep`)."""
    if "//" in path or "/." in path:
        path = "/" + posixpath.normpath(path).lstrip("/")
    return f"{path}/".startswith(_PREFIXES)
