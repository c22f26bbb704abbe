//! `idem parked`.

use std::error::Error;
use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use idem_core::{IdempotencyKey, OwnerToken, RepairNote, Scope};
use idem_inbox::{ParkReason, ParkedMessage, Parking};
use serde_json::json;

use crate::Ended;
use crate::commands::confirm::{confirmed, expect_reason};
use crate::commands::show::identity;
use crate::output::{printable, say, say_json};
use crate::store::{Store, StoreOptions};

/// What to do with parked messages.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Lists the parked messages of a subscriber, the oldest first.
    List {
        /// The name of the subscriber, as the application gives it.
        #[arg(long)]
        subscriber: String,
        /// The most messages to list.
        #[arg(long, default_value = "50", value_name = "NUMBER")]
        limit: NonZeroU32,
    },
    /// Asks the consumers of a subscriber to handle parked messages again.
    Replay(Replay),
}

/// Which messages to handle again, and why.
#[derive(Debug, Args)]
struct Replay {
    /// The name of the subscriber.
    #[arg(long)]
    subscriber: String,
    /// The ids of the messages, as `parked list` shows them.
    #[arg(required_unless_present = "all")]
    ids: Vec<String>,
    /// All parked messages, without those whose outcome is unknown: name these by their ids, once you know.
    #[arg(long, conflicts_with = "ids")]
    all: bool,
    /// The namespace of the application. With it the note of the replay names the record of the message.
    #[arg(long, default_value = "", hide_default_value = true)]
    namespace: String,
    /// A file with the secret of the record ids, if the application has one.
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// Why. It stays in the store.
    #[arg(long, default_value = "", hide_default_value = true)]
    reason: String,
    /// Who asks for it. Default: the user of this machine.
    #[arg(long, env = "USER", default_value = "unknown")]
    actor: String,
    /// The records are in another store than the messages, so no note is kept.
    #[arg(long)]
    without_note: bool,
    /// Does not ask.
    #[arg(long)]
    yes: bool,
    /// Shows the messages, and changes nothing.
    #[arg(long)]
    dry_run: bool,
}

/// How many messages are read at a time. Their payloads are read too.
const PART: NonZeroU32 = NonZeroU32::new(100).unwrap();

pub(crate) async fn run(store: &StoreOptions, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    let parking = store.parking().await?;
    match &options.what {
        What::List { subscriber, limit } => list(&*parking, subscriber, *limit, json).await,
        What::Replay(replay) => replay.run(&*parking, store, json).await,
    }
}

async fn list(parking: &dyn Parking, subscriber: &str, limit: NonZeroU32, json: bool) -> Result<Ended, Box<dyn Error>> {
    let (mut left, mut last) = (limit.get(), None);
    while let Some(most) = NonZeroU32::new(left.min(PART.get())) {
        let messages = parking.list(subscriber, false, last.as_ref(), most).await?;
        messages.iter().for_each(|parked| show(parked, json));
        left -= u32::try_from(messages.len()).unwrap_or(left);
        // A part with a row that cannot be read is shorter, and not the last.
        let Some(next) = messages.into_iter().next_back() else { break };
        last = Some(next);
    }
    if last.is_none() && left == limit.get() && !json {
        eprintln!("no message of this subscriber is parked");
    }
    Ok(Ended::Done)
}

/// A message to replay, without its payload.
struct Chosen {
    id: String,
    /// Its key in the parking.
    place: String,
    /// The key of its record.
    key: IdempotencyKey,
    is_requested: bool,
}

impl Replay {
    async fn run(&self, parking: &dyn Parking, store: &StoreOptions, json: bool) -> Result<Ended, Box<dyn Error>> {
        if !self.dry_run {
            expect_reason(&self.reason)?;
        }
        if json && !self.yes && !self.dry_run {
            return Err("--json does not ask: give --yes, or --dry-run".into());
        }
        let found = self.find(parking, json).await?;
        let missing: Vec<_> = self.ids.iter().filter(|id| !found.iter().any(|chosen| chosen.id == **id)).collect();
        missing.iter().for_each(|id| eprintln!("not parked: {}", printable(id)));
        let unasked: Vec<_> = found.iter().filter(|chosen| !chosen.is_requested).collect();
        let (mut requested, mut gone) = (0, 0);
        if !self.dry_run && !unasked.is_empty() {
            if !self.yes && !confirmed("give --yes")? {
                eprintln!("nothing was changed");
                return Ok(Ended::Unchanged);
            }
            let notes = match self.without_note {
                true => None,
                false => Some(store.open().await.map_err(|error| {
                    format!(
                        "there are no records beside the messages, to note the replay in ({error}); give --without-note"
                    )
                })?),
            };
            for chosen in unasked {
                match self.request(parking, notes.as_deref(), chosen).await? {
                    true => requested += 1,
                    false => {
                        gone += 1;
                        eprintln!("not parked any more, or requested by another command: {}", printable(&chosen.id));
                    }
                }
            }
        }
        let parked = found.len() - gone;
        match json {
            true => say_json(&json!({ "found": parked, "requested": requested, "gone": gone })),
            false => say(&format!("{parked} parked, {requested} replays requested")),
        }
        Ok(if missing.is_empty() && gone == 0 { Ended::Done } else { Ended::Unchanged })
    }

    /// Shows the chosen messages, and returns them.
    async fn find(&self, parking: &dyn Parking, json: bool) -> Result<Vec<Chosen>, Box<dyn Error>> {
        let (mut found, mut last, mut unknown) = (Vec::new(), None, 0);
        loop {
            let messages = parking.list(&self.subscriber, false, last.as_ref(), PART).await?;
            for parked in &messages {
                if self.all && !parked.is_requested && parked.reason == ParkReason::OutcomeUnknown.to_string() {
                    unknown += 1;
                } else if self.all || self.ids.contains(&parked.message.id) {
                    show(parked, json);
                    let message = &parked.message;
                    found.push(Chosen {
                        id: message.id.clone(),
                        place: message.parking_key(),
                        key: message.key(),
                        is_requested: parked.is_requested,
                    });
                }
            }
            // A part with a row that cannot be read is shorter, and not the last.
            let Some(next) = messages.into_iter().next_back() else { break };
            last = Some(next);
        }
        if unknown > 0 {
            eprintln!(
                "left out, because their outcome is unknown: {unknown}; look whether they took effect, and give their ids"
            );
        }
        Ok(found)
    }

    /// Requests one replay; false if the message is not parked any more. A note says who asked for it, and why.
    async fn request(
        &self,
        parking: &dyn Parking,
        notes: Option<&dyn Store>,
        chosen: &Chosen,
    ) -> Result<bool, Box<dyn Error>> {
        let scope = Scope::single_tenant(format!("inbox:{}", self.subscriber));
        let note = RepairNote {
            action: OwnerToken::random(),
            record: identity(&self.namespace, self.secret_file.as_deref())?.record_id(&scope, &chosen.key),
            actor: self.actor.clone(),
            reason: self.reason.clone(),
            resolution: "replayed".to_owned(),
            outcome: None,
        };
        if let Some(notes) = notes {
            notes.note(&note).await?;
        }
        let is_requested = parking.request_replay(&self.subscriber, &chosen.place).await?;
        let outcome = if is_requested { "requested" } else { "refused: not parked any more" };
        if let Some(notes) = notes {
            notes.note(&RepairNote { outcome: Some(outcome.to_owned()), ..note }).await?;
        }
        Ok(is_requested)
    }
}

fn show(parked: &ParkedMessage, json: bool) {
    let ParkedMessage { message, reason, parked_at_micros, replays, is_requested, .. } = parked;
    let at = idem_core::Timestamp::from_unix_micros(*parked_at_micros).to_string();
    if json {
        say_json(&json!({
            "id": message.id, "topic": message.topic, "reason": reason, "parked_at": at, "replays": replays,
            "is_requested": is_requested, "bytes": message.payload.len(),
        }));
        return;
    }
    let (id, topic, reason) = (printable(&message.id), printable(&message.topic), printable(reason));
    let state = if *is_requested { "  replay requested" } else { "" };
    say(&format!("{at}  {id}  {topic}  {} bytes  {replays} replays{state}  {reason}", message.payload.len()));
}
