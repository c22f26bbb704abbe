//! What a layer adds to the description of an operation (OpenAPI 3.1).

use idem_core::MAX_KEY_BYTES;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{Content, Header, RefOr, Required, Response, Schema};

use crate::policy::HttpPolicy;
use crate::problem::ProblemKind;

/// The layer's own answers: their kinds, which give the statuses, and their descriptions. Several kinds may have one status,
/// and the application may use it too; the `type` tells them apart.
const ANSWERS: &[(ProblemKind, &str)] = &[
    (
        ProblemKind::KeyMissing,
        "The idempotency key is missing or malformed, or the request broke off or names two hosts.",
    ),
    (ProblemKind::PrincipalMissing, "The request names no principal that the idempotency key belongs to."),
    (ProblemKind::BodyTooSlow, "The request body took too long to arrive. Nothing ran."),
    (ProblemKind::InProgress, "The operation runs now, or it failed and rests: repeat it after Retry-After."),
    (
        ProblemKind::BodyNotRetained,
        "It completed before, and the server did not keep the body of its answer: fetch the resource.",
    ),
    (ProblemKind::BodyTooLarge, "The request body is over the limit. Nothing ran."),
    (ProblemKind::GrpcUnsupported, "It is a request of gRPC, which this operation does not take."),
    (ProblemKind::Mismatch, "The idempotency key belongs to a different request: use a new key."),
    (
        ProblemKind::ShareExceeded,
        "The uploads of the principal fill its share of the server's memory: repeat it after Retry-After.",
    ),
    (
        ProblemKind::HandlerFailed,
        "The handler failed, the record cannot be read, or the server is misconfigured: the type says which.",
    ),
    (
        ProblemKind::StoreUnavailable,
        "The server is overloaded, cannot ask its idempotency store, or does not know the end of the operation yet: the type says \
         which. Repeat it after Retry-After.",
    ),
    (ProblemKind::OutcomeUnknown, "The server that ran it disappeared: find out whether it took effect."),
];

/// The pattern of a key header's value. A bare key begins with no quote and has no comma. In a key in quotes, quotes and
/// backslashes are escaped.
///
/// It accepts what [`parse_key_header`](crate::parse_key_header) accepts, except for parameters, which mean nothing. Spaces
/// around the value are not part of it.
const KEY_PATTERN: &str = r#"^([!#-+\--~][!-+\--~]{0,254}|"([!#-\[\]-~]|\\["\\]){1,255}")$"#;

/// 255 characters, each of them escaped, in quotes.
const KEY_MAX_CHARACTERS: usize = 2 + 2 * MAX_KEY_BYTES;

impl HttpPolicy {
    /// Adds to an operation that this policy protects what a client must know.
    ///
    /// It adds the key header, `Prefer`, the header that marks replays, and the layer's own answers as problem documents (RFC
    /// 9457):
    ///
    /// - A status that is already described keeps its description and also gets the problem document.
    /// - A `$ref` response stays unchanged, because unprotected operations may share its target. Describe the layer's answer
    ///   in the target.
    ///
    /// A second call on the same operation changes nothing.
    pub fn describe(&self, operation: &mut Operation) {
        let parameters = operation.parameters.get_or_insert_default();
        if self.key_member.is_none() {
            put_header_parameter(parameters, self.key_parameter());
        }
        put_header_parameter(parameters, prefer_parameter());
        let responses = &mut operation.responses.responses;
        let is_of = |status: u16| move |(kind, _): &&(ProblemKind, &str)| self.problem_status(*kind) == status;
        for (kind, _) in ANSWERS {
            let status = self.problem_status(*kind);
            let described = responses.entry(status.to_string());
            let response = described.or_insert_with(|| {
                let all = ANSWERS.iter().filter(is_of(status)).map(|(_, description)| *description);
                RefOr::T(Response::new(all.collect::<Vec<_>>().join(" ")))
            });
            if let RefOr::T(response) = response {
                if self.problems.body.is_none() {
                    let problem = || Content::new(Some(problem_schema(*kind)));
                    response.content.entry("application/problem+json".to_owned()).or_insert_with(problem);
                }
                if !response.headers.keys().any(|name| name.eq_ignore_ascii_case("Cache-Control")) {
                    put_header(response, "Cache-Control", no_store());
                }
                match kind {
                    ProblemKind::InProgress | ProblemKind::StoreUnavailable | ProblemKind::ShareExceeded => {
                        put_header(response, "Retry-After", retry_after());
                    }
                    ProblemKind::PrincipalMissing => put_header(response, "WWW-Authenticate", challenge()),
                    _ => {}
                }
            }
        }
        let replay = String::from_utf8_lossy(&self.replay_header).into_owned();
        for response in responses.values_mut() {
            if let RefOr::T(response) = response {
                put_header(response, &replay, replay_header());
                put_header(response, "Idempotency-Retention", retention_header());
            }
        }
    }

    fn key_parameter(&self) -> Parameter {
        let schema = text()
            .min_length(Some(self.min_key_length))
            .max_length(Some(KEY_MAX_CHARACTERS))
            .pattern(Some(KEY_PATTERN));
        ParameterBuilder::new()
            .name(&self.key_header)
            .parameter_in(ParameterIn::Header)
            .required(if self.key_required { Required::True } else { Required::False })
            .description(Some(
                "New for every operation, and the same on every repeat of it: 1 to 255 visible ASCII characters. May be \
                 sent in quotes, as a String of RFC 9651.",
            ))
            .schema(Some(Schema::Object(schema.build())))
            .build()
    }
}

/// Adds a header parameter, or replaces the one of this name. Names of header fields are case-insensitive.
fn put_header_parameter(parameters: &mut Vec<Parameter>, parameter: Parameter) {
    let is_it = |other: &&mut Parameter| {
        other.parameter_in == ParameterIn::Header && other.name.eq_ignore_ascii_case(&parameter.name)
    };
    match parameters.iter_mut().find(is_it) {
        Some(other) => *other = parameter,
        None => parameters.push(parameter),
    }
}

/// Adds a header, or replaces the one of this name.
fn put_header(response: &mut Response, name: &str, header: Header) {
    response.headers.retain(|other, _| !other.eq_ignore_ascii_case(name));
    response.headers.insert(name.to_owned(), header);
}

fn prefer_parameter() -> Parameter {
    ParameterBuilder::new()
        .name("Prefer")
        .parameter_in(ParameterIn::Header)
        .required(Required::False)
        .description(Some("`wait=N` waits up to N seconds for the answer of a run in progress (RFC 7240); what is not understood is ignored."))
        .schema(Some(Schema::Object(text().build())))
        .build()
}

fn retry_after() -> Header {
    let seconds = ObjectBuilder::new().schema_type(SchemaType::Type(Type::Integer));
    let header = HeaderBuilder::new().schema(Schema::Object(seconds.build()));
    header.description(Some("Seconds, after which to repeat the request with the same key.")).build()
}

/// Not required, because the application may answer with the same status.
fn no_store() -> Header {
    let header = HeaderBuilder::new().schema(Schema::Object(text().build()));
    header
        .description(Some("`no-store` on a problem document of the idempotency layer (RFC 9111 section 5.2.2.5)."))
        .build()
}

fn challenge() -> Header {
    let header = HeaderBuilder::new().schema(Schema::Object(text().build()));
    header.description(Some("How to authenticate (RFC 9110 section 11.6.1).")).build()
}

fn replay_header() -> Header {
    let schema = text().enum_values(Some(["true"])).build();
    HeaderBuilder::new()
        .schema(Schema::Object(schema))
        .description(Some("On a replay. A first answer has it only if the handler passes on that of another server."))
        .build()
}

fn retention_header() -> Header {
    let seconds = ObjectBuilder::new().schema_type(SchemaType::Type(Type::Integer));
    let header = HeaderBuilder::new().schema(Schema::Object(seconds.build()));
    header
        .description(Some("On a first answer whose record is kept: for how many seconds a repeat gets this answer."))
        .build()
}

fn problem_schema(kind: ProblemKind) -> Schema {
    let status = || ObjectBuilder::new().schema_type(SchemaType::Type(Type::Integer));
    let members = ["type", "title", "detail"];
    let problem =
        members.iter().fold(ObjectBuilder::new(), |problem, name| problem.property(*name, text()).required(*name));
    let problem = problem.property("status", status()).required("status");
    let problem = match kind {
        ProblemKind::BodyNotRetained => problem.property("original_status", status()),
        _ => problem,
    };
    Schema::Object(problem.description(Some("A problem document (RFC 9457).")).build())
}

fn text() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::Type(Type::String))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use utoipa::openapi::path::OperationBuilder;
    use utoipa::openapi::{Ref, ResponseBuilder};

    use crate::parse_key_header;

    use super::*;

    fn described(policy: &HttpPolicy, operation: OperationBuilder) -> serde_json::Value {
        let mut operation = operation.build();
        policy.describe(&mut operation);
        serde_json::to_value(operation).unwrap()
    }

    #[test]
    fn the_key_is_a_header_that_is_required_where_the_policy_says_so() {
        let required = described(&HttpPolicy::new(), OperationBuilder::new());
        let key = &required["parameters"][0];
        assert_eq!(
            (&key["name"], &key["in"], &key["required"]),
            (&"idempotency-key".into(), &"header".into(), &true.into())
        );
        let optional = described(&HttpPolicy::new().key_optional().key_header("X-Key"), OperationBuilder::new());
        let key = &optional["parameters"][0];
        assert_eq!((&key["name"], &key["required"]), (&"x-key".into(), &false.into()));
    }

    #[test]
    fn every_answer_of_the_layer_is_described_as_a_problem() {
        let described = described(&HttpPolicy::new(), OperationBuilder::new());
        for status in [400, 401, 408, 409, 410, 413, 415, 422, 429, 500, 503, 504] {
            let response = &described["responses"][status.to_string()];
            let problem = &response["content"]["application/problem+json"]["schema"];
            assert_eq!(problem["required"], serde_json::json!(["type", "title", "detail", "status"]), "{status}");
            assert!(response["headers"]["idempotency-replayed"].is_object());
            assert!(response["headers"]["Cache-Control"].is_object(), "{status}");
        }
        assert!(described["responses"]["409"]["headers"]["Retry-After"].is_object());
        assert!(described["responses"]["401"]["headers"]["WWW-Authenticate"].is_object());
    }

    #[test]
    fn only_the_tombstone_has_the_status_of_the_answer_that_is_gone() {
        let described = described(&HttpPolicy::new(), OperationBuilder::new());
        let has_it = |status: &str| {
            let schema = &described["responses"][status]["content"]["application/problem+json"]["schema"];
            assert!(!schema["required"].as_array().unwrap().contains(&"original_status".into()), "it may be left out");
            schema["properties"]["original_status"].is_object()
        };
        assert!(has_it("410"));
        assert!(!has_it("409"));
    }

    fn matches(value: &str) -> bool {
        let pattern = regex_lite::Regex::new(KEY_PATTERN).unwrap();
        value.len() <= KEY_MAX_CHARACTERS && pattern.is_match(value)
    }

    #[test]
    fn the_longest_key_in_each_spelling_is_described_and_one_more_character_is_not() {
        for (before, character, after) in [("", "k", ""), ("\"", "k", "\""), ("\"", r#"\""#, "\""), ("\"", r"\\", "\"")]
        {
            for (length, is_key) in [(1, true), (255, true), (256, false)] {
                let value = format!("{before}{}{after}", character.repeat(length));
                assert_eq!(parse_key_header([value.as_bytes()].into_iter()).is_ok(), is_key, "{value}");
                assert_eq!(matches(&value), is_key, "{value}");
            }
        }
    }

    proptest! {
        /// Mostly quotes, backslashes and commas, which the pattern treats specially.
        #[test]
        fn the_pattern_takes_what_the_parser_takes(value in r#""?(["\\,]|[ -~]|\\["\\]){0,8}"?"#) {
            // A server leaves out the spaces around a value.
            let value = value.trim_matches(' ');
            let is_key = parse_key_header([value.as_bytes()].into_iter()).is_ok();
            let may_have_parameters = value.starts_with('"') && value.contains("\";");
            prop_assert!(matches(value) == is_key || is_key && may_have_parameters);
        }
    }

    #[test]
    fn what_the_application_says_of_a_status_stays() {
        let own = ResponseBuilder::new().description("not a payment").content("text/plain", Content::default());
        let operation = OperationBuilder::new().response("422", own).response("201", Response::new("made"));
        let described = described(&HttpPolicy::new(), operation);
        let refused = &described["responses"]["422"];
        assert_eq!(refused["description"], "not a payment");
        assert!(refused["content"]["text/plain"].is_object());
        assert!(refused["content"]["application/problem+json"].is_object());
        assert!(described["responses"]["201"]["headers"]["idempotency-replayed"].is_object());
    }

    #[test]
    fn a_reference_to_a_response_stays_as_it_is() {
        let operation = OperationBuilder::new().response("422", Ref::from_response_name("refused"));
        let described = described(&HttpPolicy::new(), operation);
        assert_eq!(described["responses"]["422"], serde_json::json!({ "$ref": "#/components/responses/refused" }));
        assert!(described["responses"]["409"]["content"].is_object(), "the others are described");
    }

    #[test]
    fn to_describe_an_operation_twice_is_the_same_as_once() {
        let own = |name: &str, place| ParameterBuilder::new().name(name).parameter_in(place).build();
        let mut operation = OperationBuilder::new()
            .parameter(own("Idempotency-Key", ParameterIn::Header))
            .parameter(own("prefer", ParameterIn::Query))
            .response("503", ResponseBuilder::new().header("retry-after", Header::default()))
            .build();
        HttpPolicy::new().describe(&mut operation);
        let once = serde_json::to_value(&operation).unwrap();
        HttpPolicy::new().describe(&mut operation);
        assert_eq!(serde_json::to_value(&operation).unwrap(), once);
        let parameters = once["parameters"].as_array().unwrap();
        let named: Vec<_> = parameters.iter().map(|one| (one["name"].as_str(), one["in"].as_str())).collect();
        let header = Some("header");
        let expected = [(Some("idempotency-key"), header), (Some("prefer"), Some("query")), (Some("Prefer"), header)];
        assert_eq!(named, expected);
        let headers: Vec<_> = once["responses"]["503"]["headers"].as_object().unwrap().keys().collect();
        assert_eq!(headers, ["Cache-Control", "Idempotency-Retention", "Retry-After", "idempotency-replayed"]);
    }

    #[test]
    fn what_a_policy_changes_is_described_as_it_is() {
        let mut operation = OperationBuilder::new().build();
        let policy = HttpPolicy::new().mismatch_is_conflict().key_member("/id".parse().unwrap());
        policy.problem_body("application/json", |_, _| Vec::new()).describe(&mut operation);
        assert!(!operation.responses.responses.contains_key("422"));
        let Some(RefOr::T(conflict)) = operation.responses.responses.get("409") else { panic!("no 409") };
        for part in ["repeat it after Retry-After", "use a new key"] {
            assert!(conflict.description.contains(part), "{}", conflict.description);
        }
        let parameters = operation.parameters.unwrap_or_default();
        assert!(!parameters.iter().any(|parameter| parameter.name == "idempotency-key"), "the key is in the body");
        for response in operation.responses.responses.values() {
            let RefOr::T(response) = response else { panic!("a reference") };
            assert!(!response.content.contains_key("application/problem+json"));
        }
    }
}
