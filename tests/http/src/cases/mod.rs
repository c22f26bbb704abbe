//! The cases in one table.

mod connections;
mod disconnects;
mod duplicates;
mod fidelity;
mod fingerprints;
mod keys;
mod mirror;
mod notices;
mod protocols;
mod settlements;
mod timeouts;
mod uploads;

use crate::exchange::Protocol;
use crate::target::Target;

/// One requirement for a server.
#[derive(Debug)]
#[non_exhaustive]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    pub(crate) run: fn(&Target),
    /// The only protocol that can express it, and the reason.
    pub only: Option<(Protocol, &'static str)>,
}

impl Case {
    /// Whether it can run over this protocol.
    #[must_use]
    pub fn runs_over(&self, protocol: Protocol) -> bool {
        self.only.is_none_or(|(only, _)| only == protocol)
    }
}

macro_rules! table {
    ($($module:ident: $($case:ident $([$only:ident: $why:literal])?)+;)+) => {
        &[$($(Case {
            name: stringify!($case),
            run: $module::$case,
            only: table!(@ $($only $why)?),
        },)+)+]
    };
    (@) => { None };
    (@ $only:ident $why:literal) => { Some((Protocol::$only, $why)) };
}

/// All cases. Add a new case here, and name its protocol if only one can express it.
pub const CASES: &[Case] = table! {
    keys:
        a_quoted_and_a_bare_key_are_the_same_whatever_the_case_of_the_header_name
        whatever_is_not_one_key_is_refused_and_leaves_no_record
        a_key_with_control_bytes_never_gets_through [Http1: "a server resets the stream of a malformed field instead of an answer"]
        the_longest_key_is_a_key_quoted_or_not
        two_tenants_with_the_same_key_never_meet
        two_routes_with_the_same_key_never_meet
        where_a_key_is_optional_a_request_without_one_is_not_protected
        a_request_without_a_principal_is_401_even_without_a_key;
    fingerprints:
        white_space_and_member_order_do_not_matter
        any_other_request_under_the_same_key_is_a_mismatch_and_does_not_run
        the_boundary_of_multipart_does_not_matter_and_its_parts_do
        other_headers_belong_to_no_fingerprint
        another_request_while_the_first_runs_never_runs;
    fidelity:
        the_first_answer_is_replayed_again_and_again
        header_fields_survive_in_order_repeated_and_not_utf_8
        a_cookie_reaches_the_first_client_only
        fields_of_the_moment_reach_the_first_client_only
        a_binary_body_in_chunks_is_replayed_byte_by_byte
        a_body_at_the_limit_is_kept_and_a_larger_one_leaves_a_tombstone
        a_large_answer_streams_on_beyond_what_is_kept
        an_answer_without_a_body_is_replayed_without_one
        an_answer_without_content_is_replayed_without_any
        an_event_stream_is_not_kept_and_never_runs_again
        an_event_stream_is_sent_as_it_comes
        an_answer_that_breaks_off_is_no_success
        an_answer_that_breaks_off_beyond_what_is_kept_was_made
        head_says_what_get_says_without_the_body
        a_refusal_of_the_application_is_its_own_and_is_replayed;
    settlements:
        every_status_that_says_something_about_the_operation_is_replayed
        every_status_that_says_nothing_about_it_frees_the_key
        a_fault_is_settled_as_the_contract_says
        a_panic_is_settled_as_a_fault_and_answered_with_a_problem
        under_transactional_only_intended_answers_keep_their_writes
        a_fault_runs_again_when_the_contract_says_so
        a_handler_may_say_how_its_answer_is_settled;
    timeouts:
        a_timeout_outside_answers_the_client_and_the_run_goes_on
        a_timeout_inside_is_a_fault;
    mirror:
        two_methods_with_the_same_key_never_meet
        methods_that_are_safe_and_those_that_are_not_named_create_no_record
        the_options_of_a_policy_are_obeyed
        cors_outside_lets_pages_send_keys_and_see_replays
        compression_outside_is_for_who_asks_now;
    notices:
        the_key_is_a_member_of_the_body_and_replays_have_no_body
        a_notice_that_is_corrected_runs_under_its_key
        a_refused_notice_says_so_as_the_policy_has_it;
    duplicates:
        a_duplicate_of_a_running_request_is_409_and_says_when_to_come_back
        a_client_may_ask_to_wait
        a_wait_ends_when_the_client_said
        of_100_duplicates_one_runs_and_the_others_are_turned_away
        of_100_duplicates_that_wait_all_get_the_same_answer
        of_1000_that_wait_for_one_key_none_runs_again_and_each_takes_little_room;
    disconnects:
        a_client_that_leaves_during_its_upload_leaves_nothing_behind
        a_client_that_leaves_before_the_effect_finds_its_payment_made_once
        a_client_that_leaves_after_the_effect_finds_its_payment_made_once
        a_client_that_leaves_after_the_settlement_finds_its_answer
        a_client_that_leaves_during_its_answer_finds_that_it_was_made;
    protocols:
        what_came_by_one_protocol_is_replayed_by_the_other
        the_host_is_the_same_whichever_protocol_names_it
        a_target_in_absolute_form_names_its_host [Http1: "a target has no other form over HTTP/2"]
        a_host_beside_another_one_is_refused [Http2: "a request with two fields of that name is malformed over HTTP/1.1"]
        cookies_in_several_fields_are_those_in_one
        trailers_of_a_request_change_nothing
        an_answer_that_never_ends_is_a_fault
        streams_of_one_connection_do_not_wait_for_one_another [Http2: "a connection of HTTP/1.1 has no streams"];
    uploads:
        a_body_at_the_limit_is_taken_and_a_larger_one_is_refused
        a_body_that_declares_too_much_is_refused_before_it_is_sent
        a_body_in_chunks_over_the_limit_is_refused_while_it_arrives
        a_slow_upload_holds_no_lease
        how_a_body_is_cut_does_not_matter
        a_client_that_asks_before_it_sends_is_answered [Http1: "these servers await the body without asking for it"];
    connections:
        a_connection_serves_on_after_each_kind_of_answer
        what_a_refused_body_says_is_never_obeyed [Http1: "frames have lengths, so that no body can be taken for a request"]
        pipelined_requests_are_answered_in_their_order [Http1: "requests have streams instead of an order"]
        a_page_that_is_not_there_or_takes_no_such_method_says_so
        the_description_names_the_key_and_the_answers_of_the_layer;
};
