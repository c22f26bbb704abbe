//! The arguments of the schema's functions: one array for each parameter, with one element for each verb.

use idem_core::codec::takeover_number;
use idem_core::{Acquire, RECORD_FORMAT};
use sqlx::Postgres;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;

use crate::batch::verb::Verb;
use crate::sql::{Sql, micros, readable};

/// Takes the arguments of a call in their order.
pub(crate) trait Arguments: Sized {
    fn number(self, number: i64) -> Self;
    fn numbers(self, numbers: impl Iterator<Item = Option<i64>>) -> Self;
    fn byte_strings<'a>(self, strings: impl Iterator<Item = Option<&'a [u8]>>) -> Self;
}

/// Writes arguments as SQL literals, after the opening parenthesis of a call.
pub(crate) struct LiteralArguments<'a> {
    pub(crate) sql: &'a mut Sql,
    pub(crate) is_first: bool,
}

impl LiteralArguments<'_> {
    fn next(&mut self) -> &mut Sql {
        if !std::mem::take(&mut self.is_first) {
            self.sql.push(",");
        }
        self.sql
    }
}

impl Arguments for LiteralArguments<'_> {
    fn number(mut self, number: i64) -> Self {
        self.next().number(number);
        self
    }

    fn numbers(mut self, numbers: impl Iterator<Item = Option<i64>>) -> Self {
        self.next().numbers(numbers);
        self
    }

    fn byte_strings<'a>(mut self, strings: impl Iterator<Item = Option<&'a [u8]>>) -> Self {
        self.next().byte_strings(strings);
        self
    }
}

/// Binds arguments as parameters of a prepared statement.
pub(crate) type PreparedCall = Query<'static, Postgres, PgArguments>;

impl Arguments for PreparedCall {
    fn number(self, number: i64) -> Self {
        self.bind(number)
    }

    fn numbers(self, numbers: impl Iterator<Item = Option<i64>>) -> Self {
        self.bind(numbers.collect::<Vec<_>>())
    }

    fn byte_strings<'a>(self, strings: impl Iterator<Item = Option<&'a [u8]>>) -> Self {
        self.bind(strings.collect::<Vec<_>>())
    }
}

pub(crate) fn acquire<'a, A: Arguments>(to: A, skew: i64, verbs: impl Iterator<Item = &'a Verb> + Clone) -> A {
    let items = verbs.filter_map(|verb| match verb {
        Verb::Acquire { request, lock } => Some((request, *lock)),
        _ => None,
    });
    let requests = items.clone().map(|(request, _)| request);
    let text = |of: fn(&Acquire) -> Option<&str>| requests.clone().map(move |request| of(request).map(readable));
    let namespaces: Vec<_> = text(|request| Some(&request.origin.namespace)).collect();
    let principals: Vec<_> = text(|request| request.origin.scope.principal()).collect();
    let operations: Vec<_> = text(|request| Some(request.origin.scope.operation())).collect();
    let number = |of: fn(&Acquire) -> i64| requests.clone().map(move |request| Some(of(request)));
    let format = |_: &Acquire| i64::from(RECORD_FORMAT);
    to.number(skew)
        .byte_strings(requests.clone().map(|request| Some(request.id.as_bytes().as_slice())))
        .numbers(items.clone().map(|(_, lock)| Some(lock)))
        .byte_strings(namespaces.iter().map(Option::as_deref))
        .byte_strings(principals.iter().map(Option::as_deref))
        .byte_strings(operations.iter().map(Option::as_deref))
        .numbers(number(format))
        .numbers(number(|request| i64::from(request.fingerprint.algorithm().number())))
        .byte_strings(requests.clone().map(|request| Some(request.fingerprint.digest().as_slice())))
        .byte_strings(requests.clone().map(|request| Some(request.owner.as_bytes().as_slice())))
        .numbers(number(|request| takeover_number(request.takeover)))
        .numbers(number(|request| micros(request.term.lease)))
        .numbers(number(|request| micros(request.term.retention)))
}

pub(crate) fn look<'a, A: Arguments>(to: A, skew: i64, verbs: impl Iterator<Item = &'a Verb> + Clone) -> A {
    let items = verbs.filter_map(|verb| match verb {
        Verb::Lookup { id, lock, .. } => Some((id, *lock)),
        _ => None,
    });
    to.number(skew)
        .byte_strings(items.clone().map(|(id, _)| Some(id.as_bytes().as_slice())))
        .numbers(items.map(|(_, lock)| lock))
}

pub(crate) fn renew<'a, A: Arguments>(to: A, skew: i64, verbs: impl Iterator<Item = &'a Verb> + Clone) -> A {
    let items = verbs.filter_map(|verb| match verb {
        Verb::Renew { id, owner, term } => Some((id, owner, term)),
        _ => None,
    });
    to.number(skew)
        .byte_strings(items.clone().map(|(id, ..)| Some(id.as_bytes().as_slice())))
        .byte_strings(items.clone().map(|(_, owner, _)| Some(owner.as_bytes().as_slice())))
        .numbers(items.clone().map(|(.., term)| Some(micros(term.lease))))
        .numbers(items.map(|(.., term)| Some(micros(term.retention))))
}

pub(crate) fn checkpoint<'a, A: Arguments>(to: A, skew: i64, verbs: impl Iterator<Item = &'a Verb> + Clone) -> A {
    let items = verbs.filter_map(|verb| match verb {
        Verb::Checkpoint { id, owner, name, data } => Some((id, owner, name, data)),
        _ => None,
    });
    to.number(skew)
        .byte_strings(items.clone().map(|(id, ..)| Some(id.as_bytes().as_slice())))
        .byte_strings(items.clone().map(|(_, owner, ..)| Some(owner.as_bytes().as_slice())))
        .byte_strings(items.clone().map(|(.., name, _)| Some(name.as_bytes())))
        .byte_strings(items.map(|(.., data)| Some(data.as_slice())))
}

pub(crate) fn settle<'a, A: Arguments>(to: A, skew: i64, verbs: impl Iterator<Item = &'a Verb> + Clone) -> A {
    let items = verbs.filter_map(|verb| match verb {
        Verb::Settle { id, owner, settlement } => Some((id, owner, settlement)),
        _ => None,
    });
    to.number(skew)
        .byte_strings(items.clone().map(|(id, ..)| Some(id.as_bytes().as_slice())))
        .byte_strings(items.clone().map(|(_, owner, _)| Some(owner.as_bytes().as_slice())))
        .numbers(items.clone().map(|(.., settlement)| Some(settlement.state)))
        .numbers(items.clone().map(|(.., settlement)| settlement.retry_after))
        .numbers(items.clone().map(|(.., settlement)| Some(settlement.status)))
        .byte_strings(items.clone().map(|(.., settlement)| Some(&settlement.headers[..])))
        .byte_strings(items.clone().map(|(.., settlement)| settlement.body.as_deref()))
        .numbers(items.map(|(.., settlement)| Some(settlement.retention)))
}

pub(crate) fn release<'a, A: Arguments>(to: A, skew: i64, verbs: impl Iterator<Item = &'a Verb> + Clone) -> A {
    let items = verbs.filter_map(|verb| match verb {
        Verb::Release { id, owner } => Some((id, owner)),
        _ => None,
    });
    to.number(skew)
        .byte_strings(items.clone().map(|(id, _)| Some(id.as_bytes().as_slice())))
        .byte_strings(items.map(|(_, owner)| Some(owner.as_bytes().as_slice())))
}
