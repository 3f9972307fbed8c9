//! The conformance suite: what every store driver must do, one function per behaviour.
//!
//! A driver's `tests/it` calls [`conformance!`] with a function that makes an empty store, and each case below becomes
//! a test of its own there. The clock of a case stands still unless the case moves it, ids are drawn in order, and
//! nothing sleeps.
//!
//! What must stay true: a case knows the trait and nothing of any driver. What it deliberately does not do: measure.

pub mod calls;
pub mod claims;
pub mod enqueue;
pub mod entries;
pub mod hosts;
pub mod inside;
pub mod keys;
pub mod operators;
pub mod pauses;
pub mod settles;
mod world;

pub use world::{Host, Subject, World, done, fifo, gated, hand_back, mutex, plain, retries, retry_at, semaphore, settle, skipping};

/// Makes one `#[tokio::test]` of every case. `$open` names an `async fn() -> Subject` by its full path.
#[macro_export]
macro_rules! conformance {
    ($open:path) => {
        $crate::conformance! { $open, enqueue:
            a_job_is_stored_exactly, the_largest_payload_fits, one_bad_job_refuses_only_itself, the_same_id_again_is_a_duplicate,
            a_unique_key_has_one_live_job, a_scheduled_job_waits_until_it_is_due, thousands_that_fall_due_together_all_run,
            children_come_with_a_completed_end_or_not_at_all
        }
        $crate::conformance! { $open, claims:
            the_oldest_due_comes_first_over_all_lanes, a_claim_keeps_to_its_lanes, no_job_goes_to_two_hosts,
            ten_thousand_jobs_of_another_host_hide_nothing, a_host_without_registration_is_told_so, runs_and_attempts_are_counted_apart,
            the_claim_stamps_what_won_and_where_it_came_from, a_stamp_outlives_everything, a_key_without_its_field_fails_that_job_alone,
            a_waiting_job_says_why
        }
        $crate::conformance! { $open, settles:
            every_ending_leads_where_it_says, who_has_not_begun_was_never_claimed, result_and_error_are_kept,
            a_late_end_changes_and_frees_nothing, ends_of_others_are_late,
            a_repeated_end_is_recognised, state_commits_with_the_end, state_at_once_needs_a_live_run, a_poison_end_takes_nobody_with_it,
            output_is_kept_in_order, hostile_output_does_not_keep_a_job_running
        }
        $crate::conformance! { $open, keys:
            a_mutex_runs_one_at_a_time, one_batch_holds_no_key_twice, a_semaphore_is_filled_and_not_overfilled,
            skip_deletes_what_is_surplus_and_says_who_held, skip_never_deletes_what_has_run, skip_does_not_count_an_operators_limit,
            a_wait_is_told_once, a_parked_job_says_what_it_waits_for, fifo_keeps_the_order,
            a_blocking_head_keeps_the_key_through_its_delay, a_blocking_head_that_is_cancelled_lets_go, a_passing_head_lets_others_by,
            a_job_of_the_far_future_freezes_nothing, weights_are_counted_and_heavy_jobs_do_not_starve,
            a_job_too_heavy_for_the_limit_holds_nobody_up, several_keys_are_taken_all_or_none_in_one_order,
            a_wide_job_that_is_refused_hands_on_what_it_was_woken_for, lowering_a_limit_kills_nobody,
            raising_a_limit_starts_the_difference, zero_pauses_a_key, a_reservation_obeys_a_limit_lowered_since,
            waiters_keep_the_limit_they_were_stamped_with, a_holder_at_one_is_alone, who_leaves_the_line_passes_on,
            an_unclaimed_reservation_goes_on, waiters_without_a_host_are_passed_over, gated_jobs_in_front_hide_nobody,
            a_long_line_is_served_to_its_end, waiters_cost_others_nothing, later_holders_have_larger_tokens
        }
        $crate::conformance! { $open, inside:
            a_job_waits_inside_the_host_that_holds_its_key, waiters_are_taken_in_their_order, older_waiters_come_before_new_jobs,
            only_what_could_have_the_slot_waits_inside, a_slot_passes_on_with_the_ends, a_slot_passes_on_whatever_the_end,
            a_slot_that_is_not_there_does_not_pass, a_local_waiter_goes_back_as_it_came,
            a_fresh_local_waiter_goes_back_as_it_came, a_local_waiter_goes_back_and_comes_again_at_once, a_slot_that_came_to_a_waiter_that_does_not_begin_is_handed_on,
            an_operators_limit_stops_new_local_waiters, skip_is_decided_before_anybody_waits_inside, a_rescue_gives_local_waiters_back,
            a_renewal_hands_back_a_local_waiter_that_its_host_does_not_know
        }
        $crate::conformance! { $open, entries:
            an_enqueued_job, a_scheduled_job, a_child_of_a_handler, an_operators_requeue, a_rescued_job, a_retried_job, a_snoozed_job,
            a_job_handed_back, an_explicit_policy_outranks
        }
        $crate::conformance! { $open, hosts:
            hosts_are_seen, a_renewal_compares_what_both_sides_know, a_rescue_gives_everything_back, a_job_that_kills_its_hosts_is_failed,
            a_leaving_host_hands_back
        }
        $crate::conformance! { $open, operators:
            cancelling_depends_on_the_state, a_cancelled_run_does_not_come_back, requeueing_starts_afresh, deleting_removes_everything,
            lists_filter_and_page, keys_are_listed_busiest_first, the_overview_adds_up, queues_are_told_by_their_depth, retention_removes_what_is_old_enough,
            retention_keeps_the_keys_of_the_living
        }
        $crate::conformance! { $open, pauses:
            a_paused_queue_starts_nothing_new, a_paused_host_starts_nothing_new, waiters_of_a_paused_queue_are_passed_over,
            waiters_for_a_paused_host_are_passed_over, a_reservation_in_a_paused_queue_goes_on, hosts_hear_of_pauses
        }
        $crate::conformance! { $open, calls:
            a_dropped_call_is_done_or_not_begun, many_callers_at_once, whatever_makes_a_job_runnable_wakes
        }
    };
    ($open:path, $group:ident: $($case:ident),+) => {
        mod $group {
            $(
                #[tokio::test]
                async fn $case() {
                    $crate::$group::$case($crate::World::new($open().await)).await;
                }
            )+
        }
    };
}

#[cfg(test)]
mod tests {
    /// A case that nobody lists is a test that nobody runs.
    #[test]
    fn every_case_is_listed() {
        let listed = include_str!("lib.rs");
        let groups = [
            include_str!("calls.rs"),
            include_str!("claims.rs"),
            include_str!("enqueue.rs"),
            include_str!("entries.rs"),
            include_str!("hosts.rs"),
            include_str!("inside.rs"),
            include_str!("keys.rs"),
            include_str!("operators.rs"),
            include_str!("pauses.rs"),
            include_str!("settles.rs"),
        ];
        let cases: Vec<_> = groups.iter().flat_map(|text| text.lines()).filter_map(|line| line.strip_prefix("pub async fn ")).collect();
        assert!(cases.len() > 70, "the cases are found");
        for case in cases {
            let name = case.split('(').next().unwrap_or_default();
            assert!(listed.contains(&format!("{name},")) || listed.contains(&format!("{name}\n")), "`{name}` is in no list");
        }
    }
}
