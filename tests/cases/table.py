"""Which tests prove each recorded fault as a kind: the case's number, then their node ids.

A node id without brackets stands for all its parameters. `tests/conftest.py` marks these tests
`cases`, so that `make cases` runs them, and `test_cases_are_covered.py` sees that each exists.
"""

_ANSWERS = "tests/cases/test_answers.py::"
_DRY = "tests/integration/test_enqueue_inputs.py::"
_MANIFEST = _DRY + "test_each_line_gets_the_verdict_of_the_manifest"
_ASKED = (
    "tests/integration/test_inputs_reach_the_server.py::"
    "test_every_accepted_row_of_every_case_is_asked_once_and_as_it_stands"
)
_INPUTS = "tests/cases/test_inputs.py::"
_EXACT = "tests/unit/test_prompts_exact.py::"
_FORMS = _EXACT + "test_the_form_of_an_input_changes_no_key_fingerprint_or_request"
_VERDICT = _EXACT + "test_every_line_gets_one_verdict_and_only_json_is_accepted"
_PARQUET = "tests/unit/test_prompts_parquet.py::"
_LIMITS = "tests/cases/test_limits.py::"
_DISK = "tests/faults/test_store_outages.py::"
_LOGS = "tests/faults/test_logs.py::"
_QUEUE = "tests/cases/test_queue_and_rq.py::"
_REBUILDING = "tests/cases/test_rebuilding.py::"
_RESUMING = "tests/cases/test_resuming.py::"
_OUTCOMES = "tests/acceptance/test_outcomes.py::"
_SERVER = "tests/faults/test_server_faults.py::"
_SERVERS = "tests/cases/test_servers.py::"
_SLOTS = "tests/faults/test_group_slots.py::"
_RATES = "tests/unit/test_figures.py::"
_FIGURES = "tests/cases/test_figures.py::"
_GROUP = "tests/faults/test_group.py::"
_QUEUE_CASES = "tests/integration/test_queue_cases.py::"
_CLIENT = "tests/integration/test_sglang_client.py::"
_FAULTS = "tests/unit/test_faults.py::"
_REQUESTS = "tests/unit/test_requests.py::"
_STREAMS = "tests/integration/test_sink_streams.py::"
_SINK = "tests/integration/test_sink.py::"
_SINK_S3 = "tests/integration/test_sink_s3.py::"
_ISOLATION = "tests/integration/test_isolation.py::"
_S3 = "tests/integration/test_store_s3_faults.py::"
_S3_START = "tests/integration/test_store_s3_start.py::"

CASES: dict[str, tuple[str, ...]] = {
    "B01": (
        _MANIFEST,
        _DRY + "test_the_first_id_is_read_without_the_byte_order_mark",
        _DRY + "test_a_file_of_another_form_gets_one_message_with_its_name",
        _FORMS,
    ),
    "B02": (
        _MANIFEST,
        _DRY + "test_a_file_of_another_form_gets_one_message_with_its_name",
        _DRY + "test_standard_input_is_read_like_a_file",
        _FORMS,
    ),
    "B04": (_MANIFEST, _VERDICT),
    "B05": (_MANIFEST, _DRY + "test_a_file_of_another_form_gets_one_message_with_its_name"),
    "B06": (_MANIFEST, _VERDICT),
    "B07": (_MANIFEST, _VERDICT),
    "B08": (_MANIFEST, _VERDICT),
    "B09": (_MANIFEST, _ASKED, _EXACT + "test_what_a_row_holds_is_kept_exactly"),
    "B11": (
        _MANIFEST,
        _DRY + "test_bad_rows_end_with_input_and_their_lines_unless_they_may_be_skipped",
    ),
    "B14": (_MANIFEST, _INPUTS + "test_b14_odd_ids_name_no_object_and_come_back_as_given"),
    "B15": (
        _MANIFEST,
        _INPUTS + "test_b15_an_inserted_row_is_one_new_request_after_the_run_has_ended",
    ),
    "B16": (_MANIFEST, _ASKED),
    "B17": (_MANIFEST, _ASKED),
    "B18": (_MANIFEST, _ASKED),
    "B19": (_MANIFEST, _ASKED),
    "B20": (
        _MANIFEST,
        _ASKED,
        _INPUTS + "test_b20_broken_tool_calls_fail_once_with_the_servers_words",
    ),
    "B21": (
        _MANIFEST,
        _ASKED,
        _INPUTS + "test_b21_an_image_that_is_too_large_for_the_server_fails_once",
    ),
    "B22": (
        _INPUTS + "test_b22_many_rows_take_bounded_memory",
        _INPUTS + "test_b22_a_row_of_eight_mebibytes_is_accepted_in_bounded_memory",
    ),
    "B23": (_MANIFEST, _ASKED),
    "B24": (_MANIFEST, _ASKED, _FORMS),
    "B25": (
        _MANIFEST,
        _ASKED,
        _FORMS,
        _DRY + "test_parquet_comes_through_a_pipe_too",
        _PARQUET + "test_a_null_that_only_the_schema_put_there_is_no_member",
    ),
    "B26": (
        _MANIFEST,
        _INPUTS + "test_b26_a_finished_run_has_nothing_left_to_queue",
        _INPUTS + "test_b26_nothing_to_do_is_told_and_makes_no_run",
    ),
    "B27": (_MANIFEST, _ASKED),
    "B28": (
        _SERVER + "test_each_bad_prompt_fails_by_itself_and_as_often_as_it_may_be_tried",
        _SERVER + "test_one_refused_row_of_a_hundred_costs_the_others_nothing",
        _FAULTS + "test_each_recorded_error_has_its_verdict",
        _OUTCOMES + "test_b90_failed_rows_are_never_called_done",
    ),
    "B29": (
        _LIMITS + "test_b29_what_exceeds_the_context_is_refused_once_or_made_to_fit_once",
        _FAULTS + "test_each_recorded_error_has_its_verdict",
        _REQUESTS
        + "test_a_run_that_asks_for_the_context_gets_what_it_leaves_by_one_second_request",
        _REQUESTS + "test_a_rows_own_limit_is_never_clamped",
    ),
    "B30": (
        _ANSWERS + "test_b30_an_answer_without_a_token_is_no_completion",
        _ANSWERS + "test_b30_b36_what_is_odd_about_an_answer_stands_in_its_row",
        _ANSWERS + "test_b30_b31_b36_odd_answers_are_counted",
        _FAULTS + "test_no_token_is_what_a_row_gets_that_asks_for_none",
    ),
    "B31": (
        _ANSWERS + "test_b31_every_request_says_its_limit",
        _ANSWERS + "test_b30_b31_b36_odd_answers_are_counted",
        _LIMITS + "test_b31_a_share_of_cut_answers_above_a_fifth_is_warned_of",
        _REQUESTS + "test_a_prompt_without_any_limit_never_meets_the_servers_own",
        _RATES + "test_many_cut_off_answers_are_warned_of",
    ),
    "B32": (
        _SERVER + "test_an_answer_that_takes_seven_seconds_is_waited_for",
        _CLIENT + "test_an_answer_after_seven_seconds_is_one_request",
        _LIMITS + "test_b32_without_a_flag_no_answer_has_less_than_ten_minutes",
    ),
    "B33": (
        _LIMITS + "test_b33_a_time_limit_sends_as_many_requests_as_attempts_one_after_another",
        _SERVER + "test_our_time_limit_costs_exactly_the_attempts_and_each_is_aborted",
        _CLIENT + "test_a_time_limit_aborts_by_id_before_it_closes_the_connection",
        _CLIENT + "test_a_time_limit_is_kept_when_the_abort_hangs_too",
    ),
    "B36": (
        _ANSWERS + "test_b30_b36_what_is_odd_about_an_answer_stands_in_its_row",
        _ANSWERS + "test_b30_b31_b36_odd_answers_are_counted",
        _SERVER + "test_thinking_that_uses_up_the_budget_is_kept_and_flagged",
    ),
    "B38": (
        _ANSWERS + "test_b38_a_row_says_what_was_sent",
        _REQUESTS + "test_what_is_recorded_as_sent_is_what_is_sent",
        _REQUESTS + "test_a_sample_sends_the_seed_plus_its_number",
    ),
    "B40": (
        _LIMITS + "test_b40_long_answers_are_kept_whole_in_bounded_memory",
        _CLIENT + "test_an_answer_of_two_mebibytes_comes_whole",
        _CLIENT + "test_an_answer_that_no_row_could_hold_is_given_up_and_charged",
    ),
    "B41": (
        _SERVER + "test_nothing_is_claimed_before_the_server_gave_a_token",
        _SERVER + "test_a_server_that_never_comes_ends_the_start_only_when_asked_to",
        _GROUP + "test_the_bound_is_reached_and_never_exceeded",
    ),
    "B42": (
        _SERVER + "test_a_full_server_is_left_alone_for_as_long_as_it_asks",
        _SERVER + "test_a_refusal_without_a_time_is_waited_for_longer_each_time",
        _SLOTS + "test_whatever_befalls_requests_every_slot_comes_back",
        "tests/unit/test_serve.py::test_a_refusal_for_load_waits_and_is_not_charged",
    ),
    "B43": (
        _SERVER + "test_a_server_that_hangs_behind_a_good_health_page_is_found",
        _SERVER + "test_our_time_limit_costs_exactly_the_attempts_and_each_is_aborted",
        _SERVER + "test_a_machine_that_vanishes_with_open_connections_is_found",
        _CLIENT + "test_each_fault_has_its_verdict_and_the_client_works_afterwards",
    ),
    "B45": (
        _SERVER + "test_a_server_that_dies_with_everything_in_flight_costs_no_attempt",
        _SERVER + "test_other_servers_go_on_while_one_is_dead",
        (
            "tests/faults/test_group_thieves.py::"
            "test_a_server_that_dies_with_nothing_open_is_down_and_comes_back"
        ),
    ),
    "B46": (
        _SERVER + "test_our_time_limit_costs_exactly_the_attempts_and_each_is_aborted",
        _OUTCOMES + "test_b90_failed_rows_are_never_called_done",
    ),
    "B47": (
        _FIGURES + "test_b47_one_row_that_holds_the_tail_is_seen_with_its_age",
        _RATES + "test_b47_what_is_left_of_a_tail_takes_about_as_long_as_it_has_taken",
    ),
    "B48": (
        _ANSWERS + "test_b48_what_is_no_answer_fails_after_its_attempts",
        _ANSWERS + "test_b48_nothing_else_fails_and_it_shows",
        _FAULTS + "test_any_other_body_is_a_bad_answer",
    ),
    "B49": (
        _ANSWERS + "test_b49_every_choice_is_kept_and_tokens_count_once",
        _ANSWERS + "test_b49_the_runs_tokens_are_the_sum_of_its_rows",
        "tests/unit/test_rows.py::test_every_choice_is_kept_and_the_first_goes_on",
    ),
    "B51": (
        _OUTCOMES + "test_b51_b54_a_run_in_two_parts_is_one_run_in_the_order_of_its_input",
        "tests/integration/test_export.py::test_completions_come_in_the_order_of_the_input",
        "tests/integration/test_export.py::test_rows_come_in_order_whatever_fits_in_memory",
    ),
    "B53": (
        _RESUMING + "test_b53_failed_prompts_are_tried_again_on_request_and_only_they",
        "tests/integration/test_enqueue.py::test_failed_prompts_are_tried_again_only_on_request",
    ),
    "B54": (
        _RESUMING + "test_b54_the_first_part_stays_byte_for_byte_whatever_was_restarted",
        _OUTCOMES + "test_b51_b54_a_run_in_two_parts_is_one_run_in_the_order_of_its_input",
        (
            "tests/integration/test_sink_process.py::"
            "test_a_restarted_sink_goes_on_with_the_numbering_and_the_figures"
        ),
    ),
    "B55": (_REBUILDING + "test_b55_a_run_of_which_nearly_all_is_done_is_ready_soon",),
    "B56": (
        _RESUMING + "test_b56_a_kill_of_everything_costs_what_was_in_flight_and_no_more",
        "tests/faults/test_kills.py::test_twenty_kills_lose_and_double_nothing",
    ),
    "B57": (_REBUILDING + "test_b57_a_run_that_redis_lost_goes_on_from_its_store",),
    "B58": (
        _RESUMING + "test_b58_torn_files_in_the_output_harm_nothing_that_comes_after",
        (
            "tests/integration/test_store_directory.py::"
            "test_a_killed_writer_leaves_whole_objects_and_its_temporary_file_goes"
        ),
        "tests/unit/test_store_frames.py::test_every_cut_is_noticed",
    ),
    "B59": (
        _QUEUE + "test_b59_a_dead_groups_jobs_are_back_within_three_minutes",
        _QUEUE + "test_b59_what_a_dead_group_held_is_run_again_elsewhere_and_once",
        _QUEUE_CASES
        + "test_b59_a_dead_workers_jobs_go_back_after_one_lease_and_are_not_counted_in_flight",
        _GROUP + "test_a_group_started_again_takes_over_within_five_seconds",
    ),
    "B61": (
        _QUEUE + "test_b61_rqs_cleaning_fails_nothing_whatever_stale_entry_it_finds",
        _QUEUE_CASES + "test_b61_a_finished_prompt_is_not_failed_by_rqs_cleaning_of_a_stale_entry",
    ),
    "B62": (
        _LIMITS + "test_b62_rqs_limit_of_a_job_cuts_no_answer",
        _QUEUE_CASES + "test_b62_every_job_has_a_limit_of_its_own_above_all_its_attempts",
        _QUEUE_CASES + "test_b62_rq_reads_that_limit_and_not_its_default",
    ),
    "B63": (
        _QUEUE + "test_b63_without_a_sink_and_with_deleted_jobs_nothing_is_lost",
        _QUEUE_CASES + "test_b63_results_wait_without_end_and_lost_job_hashes_break_no_count",
        (
            "tests/integration/test_status.py::"
            "test_b63_jobs_that_somebody_deleted_do_not_harm_the_figures"
        ),
    ),
    "B64": (
        _QUEUE + "test_b64_a_group_that_dies_again_and_again_is_back_each_time",
        _GROUP + "test_a_group_started_again_takes_over_within_five_seconds",
        _GROUP + "test_a_predecessor_whose_pid_belongs_to_another_process_now_is_dead",
        _GROUP + "test_two_hosts_are_told_apart_by_their_names",
    ),
    "B65": (
        _QUEUE + "test_b65_whoever_enqueues_at_once_each_prompt_is_asked_once",
        _QUEUE_CASES + "test_b65_a_file_enqueued_twice_at_the_same_moment_is_queued_once",
        _QUEUE_CASES + "test_b65_a_key_queued_again_neither_overwrites_nor_doubles_its_job",
    ),
    "B66": (
        (
            "tests/integration/test_enqueue_interrupted.py::"
            "test_a_redis_that_stays_full_ends_the_call_which_says_how_far_it_got"
        ),
        (
            "tests/faults/test_outages.py::"
            "test_more_prompts_than_redis_holds_leave_room_for_the_work_on_them"
        ),
        (
            "tests/integration/test_queue_outages.py::"
            "test_a_full_redis_refuses_a_finish_whole_and_takes_it_later"
        ),
        (
            "tests/integration/test_queue_outages.py::"
            "test_leases_and_slots_are_kept_while_redis_is_full"
        ),
        "tests/integration/test_sink.py::test_a_sink_empties_a_full_redis",
    ),
    "B67": (
        (
            "tests/integration/test_redis_refusals.py::"
            "test_every_policy_that_evicts_is_refused_also_when_it_is_set_in_mid_run"
        ),
        (
            "tests/integration/test_lost_keys.py::"
            "test_whatever_key_is_lost_each_prompt_ends_once_after_a_resume"
        ),
    ),
    "B68": (
        "tests/integration/test_status.py::test_b68_a_redis_that_came_back_empty_has_lost_the_run",
        "tests/faults/test_outages.py::test_a_run_that_lost_its_redis_goes_on_in_a_smaller_one",
        (
            "tests/integration/test_resume.py::"
            "test_a_run_that_redis_lost_comes_back_from_the_store_alone"
        ),
    ),
    "B69": (
        (
            "tests/integration/test_reconcile.py::"
            "test_what_the_store_has_is_taught_and_leaves_the_stream"
        ),
        (
            "tests/integration/test_reconcile.py::"
            "test_a_rewind_to_the_midst_of_this_very_reconcile_is_noticed"
        ),
    ),
    "B71": (
        _STREAMS + "test_b71_what_a_dead_sink_of_another_host_had_read_is_stored_by_the_next",
        _STREAMS + "test_b71_nothing_of_redis_names_a_consumer_that_could_be_deleted",
    ),
    "B72": (
        _STREAMS + "test_b72_results_that_somebody_deleted_are_noticed_and_generated_again",
        _STREAMS + "test_b72_deleted_results_do_not_stop_the_claims_for_ever",
        _STREAMS
        + "test_b72_a_client_that_trims_while_a_sink_stores_costs_a_second_answer_at_most",
        _SINK + "test_the_stream_never_shrinks_but_by_deletion_of_what_is_stored",
    ),
    "B73": (_STREAMS + "test_b73_what_is_stored_leaves_redis_whole",),
    "B74": (
        _SINK + "test_an_entry_that_is_no_result_does_not_stop_what_stands_behind_it",
        _SINK + "test_a_batch_that_the_store_refuses_is_cut_until_the_poison_entry_is_alone",
    ),
    "B75": (
        "tests/faults/test_dead_paths.py::test_b75_after_a_silent_path_all_go_on_by_themselves",
    ),
    "B76": (
        _QUEUE_CASES
        + "test_b76_ten_thousand_prompts_over_a_slow_network_take_few_answers_and_short_scripts",
        "tests/integration/test_enqueue.py::test_ten_thousand_prompts_take_few_round_trips",
    ),
    "B77": (
        (
            "tests/faults/test_clocks.py::"
            "test_b77_clocks_that_disagree_take_no_job_away_and_show_nothing_negative"
        ),
    ),
    "B78": (
        _QUEUE_CASES + "test_b78_room_is_told_by_what_is_used_and_not_by_what_the_process_holds",
        _QUEUE_CASES + "test_b78_prompts_find_room_as_soon_as_what_filled_redis_is_deleted",
    ),
    "B79": (
        _S3 + "test_a_server_that_refuses_checksum_headers_is_used_without_them",
        _S3 + "test_who_asks_for_checksums_is_told_which_setting_a_server_refuses",
    ),
    "B80": (
        _S3 + "test_credentials_that_run_out_are_read_anew_within_the_call",
        _S3 + "test_keys_that_were_replaced_are_read_anew_within_the_call",
        _S3 + "test_without_new_credentials_the_call_fails_and_may_be_repeated",
        _SINK_S3 + "test_b80_credentials_that_run_out_in_a_run_are_read_anew",
        _SINK_S3
        + "test_b80_without_new_credentials_nothing_is_lost_and_with_them_the_run_goes_on",
    ),
    "B81": (
        _S3 + "test_a_minute_of_slow_down_ends_with_the_same_object",
        _SINK_S3 + "test_b81_a_slow_down_that_outlasts_a_call_ends_with_the_same_batch_and_names",
    ),
    "B82": (
        _S3_START + "test_a_denied_right_is_named_with_bucket_and_prefix",
        _S3_START + "test_rights_that_a_sink_does_not_need_may_be_denied",
        _S3_START + "test_a_missing_bucket_is_an_error_and_is_not_made",
        _SINK_S3 + "test_b82_a_denied_write_ends_the_start_and_is_named",
        _SINK_S3 + "test_b82_rights_that_are_not_needed_may_be_denied_over_the_whole_run",
        _SINK_S3 + "test_b82_a_bucket_that_is_missing_ends_the_start_and_is_never_made",
        _SINK_S3 + "test_b82_an_enqueue_is_refused_as_its_sink_would_be",
    ),
    "B83": (_S3_START + "test_a_bucket_elsewhere_is_told_with_its_region",),
    "B84": (
        _SINK + "test_sinks_share_the_partitions_and_one_takes_over_from_another",
        "tests/integration/test_sink_process.py::test_another_runs_output_ends_the_start",
        _SINK_S3
        + "test_b84_two_sinks_that_store_at_once_write_no_name_twice_and_no_other_run_may",
    ),
    "B87": (_S3_START + "test_objects_are_single_puts_with_type_hash_and_no_encoding",),
    "B44": (
        ("tests/unit/test_watch_prefill.py::test_b44_ten_minutes_of_slow_prefill_are_waited_for"),
    ),
    "B88": (
        _FIGURES + "test_b88_what_was_done_before_a_resume_does_not_count_for_the_rate",
        _RATES + "test_b88_what_was_done_before_a_stop_does_not_count_for_now",
        _RATES + "test_b88_a_quick_restart_is_told_by_how_long_the_groups_are_up",
    ),
    "B89": (
        _RATES + "test_b89_a_stall_brings_the_rate_to_nothing_within_its_window",
        _RATES + "test_b89_before_it_and_one_window_after_it_the_rate_is_that_of_now",
    ),
    "B90": (
        _OUTCOMES + "test_b90_failed_rows_are_never_called_done",
        _QUEUE_CASES + "test_b90_failed_prompts_are_never_counted_as_completed",
        "tests/integration/test_status.py::test_b90_what_has_failed_is_never_called_done",
        "tests/unit/test_figures.py::test_nothing_passes_for_completed_that_is_not",
    ),
    "B91": (
        _FIGURES + "test_b91_no_count_goes_back_while_rows_are_tried_again",
        _QUEUE_CASES + "test_b91_counts_only_rise_while_prompts_are_tried_again",
    ),
    "B92": (
        _DISK + "test_a_full_disk_is_told_and_goes_on_when_there_is_room",
        _DISK + "test_a_disk_that_turns_read_only_is_waited_for",
        _DISK + "test_b92_a_sink_that_is_killed_on_a_full_disk_has_acknowledged_nothing",
        (
            "tests/integration/test_store_directory.py::"
            "test_a_full_disk_is_said_and_leaves_nothing_half_written"
        ),
        (
            "tests/integration/test_export_formats.py::"
            "test_a_full_disk_is_told_and_leaves_the_file_as_it_was"
        ),
        "tests/integration/test_last_words.py::test_a_stdout_that_takes_nothing_is_told_in_a_line",
        "tests/unit/test_spool.py::test_a_disk_that_fills_while_a_file_is_read_is_told_too",
    ),
    "B93": (
        _LOGS + "test_b93_a_server_that_refuses_everything_with_the_prompt_fills_no_log",
        _LOGS + "test_b93_a_redis_and_a_store_that_stay_away_fill_no_log",
        "tests/unit/test_secrecy.py::test_what_repeats_is_counted_once_a_minute_whoever_says_it",
        "tests/unit/test_secrecy.py::test_a_fact_is_one_short_line_that_no_terminal_acts_on",
        "tests/unit/test_noticing.py::test_failures_are_told_at_once_and_then_once_a_minute",
        "tests/faults/test_secrets.py::test_no_secret_and_no_prompt_gets_where_it_does_not_belong",
    ),
    "B94": ("tests/integration/test_stops.py::test_b94_a_group_that_is_pid_1_drains",),
    "B95": (_FIGURES + "test_b95_a_slow_gpu_gets_its_share_and_both_are_busy_to_the_end",),
    "B96": (
        (
            "tests/faults/test_runs_together.py::"
            "test_runs_with_equal_ids_keep_to_themselves_and_no_stuck_one_blocks_another"
        ),
        "tests/integration/test_forget.py::test_it_takes_the_run_s_keys_and_no_other",
        (
            "tests/integration/test_redis_refusals.py::"
            "test_a_name_that_another_programs_queue_bears_is_no_run"
        ),
        (
            "tests/integration/test_redis_refusals.py::"
            "test_jobs_that_others_put_into_a_runs_queue_are_never_deleted"
        ),
        (
            "tests/faults/test_foreign_programs.py::"
            "test_b96_another_program_and_two_runs_with_equal_ids_keep_to_their_own"
        ),
        _ISOLATION + "test_b96_forget_takes_one_run_of_several_with_names_and_ids_alike",
        _ISOLATION + "test_b96_two_redis_that_serve_one_output_store_each_prompt_once",
        _ISOLATION + "test_b96_an_output_belongs_to_one_run_whichever_redis_is_asked",
    ),
    "B98": (
        _SERVERS + "test_b98_workers_come_and_go_and_the_figures_follow",
        (
            "tests/integration/test_status.py::"
            "test_b98_without_workers_it_waits_for_workers_and_nobody_knows_how_long"
        ),
    ),
}

TESTS: frozenset[str] = frozenset(test for tests in CASES.values() for test in tests)
