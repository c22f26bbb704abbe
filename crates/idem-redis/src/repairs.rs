//! Notes of repairs: a list of lines, the newest first.

use std::num::NonZeroU32;

use idem_core::{OwnerToken, RecordId, Repair, RepairNote, StoreError, StoreErrorKind, Timestamp};
use redis::{Cmd, Value};

use crate::error::Phase;
use crate::keys::Keys;
use crate::reply;
use crate::script::{Exchange, Question};
use crate::store::RedisStore;

impl RedisStore {
    pub(crate) async fn write_note(&self, note: &RepairNote) -> Result<(), StoreError> {
        let what = "note a repair";
        let time = self.tell(what, &redis::cmd("TIME"), None).await?;
        let now = Timestamp::from_unix_micros(reply::server_time(time)?.unix_micros() + self.shared.offset.micros());
        let mut push = redis::cmd("LPUSH");
        push.arg(self.shared.keys.repairs()).arg(line(&self.shared.keys, now, note));
        self.tell(what, &push, self.shared.replicas).await.map(drop)
    }

    pub(crate) async fn read_notes(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        let what = "list repairs";
        let mut range = redis::cmd("LRANGE");
        range.arg(self.shared.keys.repairs()).arg(0).arg(i64::from(limit.get()) * 2);
        let Value::Array(lines) = self.tell(what, &range, None).await? else {
            return Err(reply::other("something else than a list"));
        };
        let mut repairs: Vec<Repair> = Vec::new();
        for text in lines {
            let text = reply::maybe_bytes(text)?.unwrap_or_default();
            let Some(repair) = read(&self.shared.keys, &text) else {
                tracing::warn!("a note of a repair cannot be read, perhaps because a newer version wrote it");
                continue;
            };
            // The first line says when it was asked for.
            let newer = repairs.iter().position(|newer| newer.note.is_of_the_same_repair(&repair.note));
            let later = newer.and_then(|at| repairs.remove(at).note.outcome);
            let outcome = RepairNote::outcome_after(repair.note.outcome, later);
            repairs.push(Repair { note: RepairNote { outcome, ..repair.note }, ..repair });
        }
        repairs.truncate(limit.get() as usize);
        Ok(repairs)
    }

    /// Removes a principal from the reasons of the repairs of a record.
    ///
    /// A line is found by its content, because others may be pushed meanwhile. The new one comes before the old one is removed, so that
    /// no note is lost; a reader takes the two for two repairs then.
    pub(crate) async fn erase_from_notes(&self, id: &RecordId, principal: &str) -> Result<(), StoreError> {
        let (what, key, principal) = ("erase from the notes", self.shared.keys.repairs(), part(principal));
        let mut range = redis::cmd("LRANGE");
        let Value::Array(lines) = self.tell(what, range.arg(&key).arg(0).arg(-1), None).await? else {
            return Err(reply::other("something else than a list"));
        };
        for text in lines {
            let old = reply::maybe_bytes(text)?.unwrap_or_default();
            let repair = read(&self.shared.keys, &old).filter(|repair| repair.note.record == *id);
            let Some(repair) = repair else { continue };
            let Some(reason) = repair.note.reason_without(&principal) else { continue };
            let new = line(&self.shared.keys, repair.at, &RepairNote { reason, ..repair.note });
            let mut insert = redis::cmd("LINSERT");
            insert.arg(&key).arg("BEFORE").arg(old.as_ref()).arg(new);
            self.tell(what, &insert, self.shared.replicas).await?;
            let mut remove = redis::cmd("LREM");
            self.tell(what, remove.arg(&key).arg(1).arg(old.as_ref()), self.shared.replicas).await?;
        }
        Ok(())
    }

    /// Sends a command to the server that has the notes, and returns its reply.
    async fn tell(&self, what: &str, command: &Cmd, replicas: Option<(u32, u64)>) -> Result<Value, StoreError> {
        let key = self.shared.keys.repairs();
        let question = Question::Commands { all: std::slice::from_ref(command), writing: 0 };
        let exchange = Exchange { key: key.as_bytes(), question, replicas };
        let answer = self.transport.run(&exchange, self.transport.deadline()).await;
        let mut answer = answer.map_err(|failure| failure.of(what, Phase::Serving))?;
        if let Some(found) = answer.too_few {
            let message = format!("could not {what}: only {found} replicas have it, so a failover could lose it");
            return Err(StoreError::new(StoreErrorKind::Unavailable, message).indeterminate());
        }
        answer.values.pop().ok_or_else(|| reply::other("nothing"))
    }
}

/// Between the parts of a note. It is not in them: see [`part`].
const SEPARATOR: char = '\n';

fn line(keys: &Keys, at: Timestamp, note: &RepairNote) -> String {
    let action = u128::from_be_bytes(*note.action.as_bytes());
    let outcome = note.outcome.as_deref().unwrap_or_default();
    let (at, action) = (at.unix_micros().to_string(), format!("{action:032x}"));
    let parts = [
        at,
        action,
        keys.of(&note.record),
        part(&note.actor),
        part(&note.reason),
        part(&note.resolution),
        part(outcome),
    ];
    parts.join(&SEPARATOR.to_string())
}

/// The text without line breaks.
fn part(text: &str) -> String {
    text.replace(SEPARATOR, " ")
}

fn read(keys: &Keys, line: &[u8]) -> Option<Repair> {
    let parts: Vec<&str> = std::str::from_utf8(line).ok()?.split(SEPARATOR).collect();
    let [at, action, record, actor, reason, resolution, outcome] = parts.try_into().ok()?;
    let note = RepairNote {
        action: OwnerToken::from_bytes(u128::from_str_radix(action, 16).ok()?.to_be_bytes()),
        record: keys.id(record.as_bytes())?,
        actor: actor.to_owned(),
        reason: reason.to_owned(),
        resolution: resolution.to_owned(),
        outcome: Some(outcome.to_owned()).filter(|outcome| !outcome.is_empty()),
    };
    Some(Repair { at: Timestamp::from_unix_micros(at.parse().ok()?), note })
}
