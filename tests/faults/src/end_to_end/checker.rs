//! Compares what the clients' disks know with the ledger and with the effects of the messages.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

/// A final answer, as a client got it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no other")]
pub enum Answer {
    /// The payment was made.
    Paid(Deed),
    /// Anything else, as text.
    Other(String),
}

/// A payment, as an answer or the ledger has it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Deed {
    /// The operation that it was made for.
    pub operation: String,
    /// The amount.
    pub amount: i64,
    /// The number of the payment in the ledger.
    pub payment: i64,
}

/// An operation in a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Journaled {
    /// The operation.
    pub operation: String,
    /// The amount that was asked for.
    pub amount: i64,
    /// Its final answer, if it has one.
    pub answer: Option<Answer>,
}

/// All that a run has left.
#[derive(Debug, Clone, Default)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Found {
    /// The rows of all journals.
    pub journaled: Vec<Journaled>,
    /// The answers that callers saw.
    pub seen: Vec<Answer>,
    /// The rows of the ledger.
    pub ledger: Vec<Deed>,
    /// The effects of the messages: the operation and the number of its payment.
    pub effects: Vec<(String, i64)>,
}

/// A broken promise.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Violation {
    /// The operation.
    pub operation: String,
    /// What is wrong with it.
    pub what: String,
}

/// Lists the broken promises:
///
/// - Each operation of a journal is there once, and has a final answer: its payment.
/// - The ledger has that payment, and no other one for the operation.
/// - The message of the payment has had one effect.
/// - A caller saw no other answer than the journal has.
/// - The ledger has no payment, and the messages no effect, that no journal knows.
#[must_use]
pub fn check(found: &Found) -> Vec<Violation> {
    let mut ledger = BTreeMap::<&str, Vec<&Deed>>::new();
    for deed in &found.ledger {
        ledger.entry(&deed.operation).or_default().push(deed);
    }
    let mut effects = BTreeMap::<&str, Vec<i64>>::new();
    for (operation, payment) in &found.effects {
        effects.entry(operation).or_default().push(*payment);
    }
    let mut journaled = BTreeMap::<&str, Vec<&Journaled>>::new();
    for one in &found.journaled {
        journaled.entry(&one.operation).or_default().push(one);
    }
    let mut violations = Vec::new();
    let mut fail = |operation: &str, what: String| violations.push(Violation { operation: operation.to_owned(), what });
    for (operation, rows) in &journaled {
        let [one] = rows[..] else {
            fail(operation, format!("the journals have it {} times", rows.len()));
            continue;
        };
        let deeds = ledger.get(operation).map_or(&[][..], Vec::as_slice);
        if deeds.len() != 1 {
            fail(operation, format!("the ledger has {} payments, not 1", deeds.len()));
        }
        match &one.answer {
            None => fail(operation, "the journal has no final answer".to_owned()),
            Some(Answer::Other(text)) => fail(operation, format!("the final answer is {text}")),
            Some(Answer::Paid(paid)) if paid.operation != one.operation || paid.amount != one.amount => {
                fail(operation, format!("{} was asked for, and the final answer is {paid:?}", one.amount));
            }
            Some(Answer::Paid(paid)) if !deeds.contains(&paid) => {
                fail(operation, format!("the final answer is {paid:?}, and the ledger has {deeds:?}"));
            }
            Some(Answer::Paid(_)) => {}
        }
        let effects = effects.get(operation).map_or(&[][..], Vec::as_slice);
        if effects.len() != 1 {
            fail(operation, format!("its message had {} effects, not 1", effects.len()));
        } else if !deeds.iter().any(|deed| deed.payment == effects[0]) {
            fail(operation, format!("its message had the effect of payment {}, not of {deeds:?}", effects[0]));
        }
    }
    for answer in &found.seen {
        let Answer::Paid(seen) = answer else {
            fail("", format!("a caller saw {answer:?}"));
            continue;
        };
        let is_in_journal = |one: &&Journaled| one.answer.as_ref() == Some(answer);
        if !journaled.get(&*seen.operation).is_some_and(|rows| rows.iter().any(is_in_journal)) {
            fail(&seen.operation, format!("a caller saw {seen:?}, which no journal has"));
        }
    }
    for operation in ledger.keys().filter(|operation| !journaled.contains_key(*operation)) {
        fail(operation, "the ledger has it, and no journal".to_owned());
    }
    for operation in effects.keys().filter(|operation| !journaled.contains_key(*operation)) {
        fail(operation, "its message had an effect, and no journal has it".to_owned());
    }
    violations
}

/// Reads a final answer: a payment, or the result of the job that made it.
#[must_use]
pub fn read_answer(status: u16, body: &[u8]) -> Answer {
    let document: Value = serde_json::from_slice(body).unwrap_or_default();
    let result = &document["result"];
    let paid = match status {
        201 => read_deed(&document),
        200 if document["state"] == "completed" && result["status"] == 201 => read_deed(&result["body"]),
        _ => None,
    };
    paid.map_or_else(|| Answer::Other(format!("{status} {}", String::from_utf8_lossy(body))), Answer::Paid)
}

fn read_deed(document: &Value) -> Option<Deed> {
    let operation = document["operation"].as_str()?.to_owned();
    Some(Deed { operation, amount: document["amount"].as_i64()?, payment: document["payment"].as_i64()? })
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "operation {}: {}", self.operation, self.what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deed(operation: &str, payment: i64) -> Deed {
        Deed { operation: operation.to_owned(), amount: 5, payment }
    }

    fn journaled(operation: &str, answer: Option<Answer>) -> Journaled {
        Journaled { operation: operation.to_owned(), amount: 5, answer }
    }

    /// Two operations that went well.
    fn good() -> Found {
        let paid = |operation, payment| Answer::Paid(deed(operation, payment));
        Found {
            journaled: vec![journaled("a", Some(paid("a", 1))), journaled("b", Some(paid("b", 2)))],
            seen: vec![paid("a", 1)],
            ledger: vec![deed("b", 2), deed("a", 1)],
            effects: vec![("a".to_owned(), 1), ("b".to_owned(), 2)],
        }
    }

    /// What the checker says after `spoil` about the operation `a`.
    #[track_caller]
    fn says(spoil: impl FnOnce(&mut Found), expected: &str) {
        let mut found = good();
        spoil(&mut found);
        let violations = check(&found);
        let first = violations.iter().find(|violation| violation.what.contains(expected));
        assert!(first.is_some(), "{violations:?} without {expected}");
    }

    #[test]
    fn what_is_right_is_no_violation() {
        assert_eq!(check(&good()), []);
        assert_eq!(check(&Found::default()), []);
        let mut unseen = good();
        unseen.seen.clear();
        assert_eq!(check(&unseen), []);
    }

    #[test]
    fn every_lie_is_found() {
        says(|found| found.ledger.push(deed("a", 3)), "the ledger has 2 payments, not 1");
        says(|found| found.ledger.retain(|deed| deed.operation != "a"), "the ledger has 0 payments, not 1");
        says(|found| found.journaled[0].answer = None, "the journal has no final answer");
        says(|found| found.journaled[0].answer = Some(read_answer(500, b"{}")), "the final answer is 500 {}");
        says(|found| found.journaled[0].answer = Some(Answer::Paid(deed("a", 3))), "and the ledger has [Deed");
        says(|found| found.journaled[0].answer = Some(Answer::Paid(deed("b", 2))), "5 was asked for");
        says(|found| found.journaled[0].amount = 6, "6 was asked for");
        says(|found| found.journaled.push(journaled("a", None)), "the journals have it 2 times");
        says(|found| found.effects.push(("a".to_owned(), 1)), "its message had 2 effects, not 1");
        says(|found| drop(found.effects.remove(0)), "its message had 0 effects, not 1");
        says(|found| found.effects[0].1 = 2, "the effect of payment 2, not of");
        says(|found| found.seen.push(Answer::Paid(deed("a", 3))), "which no journal has");
        says(|found| found.seen.push(read_answer(422, b"")), "a caller saw Other(\"422 \")");
        says(|found| drop(found.journaled.remove(0)), "the ledger has it, and no journal");
        says(|found| drop(found.journaled.remove(0)), "its message had an effect, and no journal has it");
    }

    #[test]
    fn answers_are_read_from_both_forms() {
        let paid = r#"{"operation":"a","amount":5,"payment":1}"#;
        assert_eq!(read_answer(201, paid.as_bytes()), Answer::Paid(deed("a", 1)));
        let job = |state, status| {
            format!(r#"{{"id":"x","state":"{state}","attempt":1,"result":{{"status":{status},"body":{paid}}}}}"#)
        };
        assert_eq!(read_answer(200, job("completed", 201).as_bytes()), Answer::Paid(deed("a", 1)));
        for (status, body) in [
            (200, paid.to_owned()),
            (202, job("completed", 201)),
            (200, job("failed", 201)),
            (200, job("completed", 500)),
            (201, r#"{"operation":"a"}"#.to_owned()),
            (201, String::new()),
        ] {
            assert!(matches!(read_answer(status, body.as_bytes()), Answer::Other(_)), "{status} {body}");
        }
    }
}
