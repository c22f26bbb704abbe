//! `idem parked`.

use std::error::Error;
use std::num::NonZeroU32;

use clap::{Args, Subcommand};
use idem_inbox::{ParkedMessage, Parking};
use serde_json::json;

use crate::Ended;
use crate::output::{printable, say, say_json};
use crate::store::StoreOptions;

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
    Replay {
        /// The name of the subscriber.
        #[arg(long)]
        subscriber: String,
        /// The ids of the messages, as `parked list` shows them.
        #[arg(required_unless_present = "all")]
        ids: Vec<String>,
        /// All parked messages.
        #[arg(long, conflicts_with = "ids")]
        all: bool,
        /// Shows the messages, and asks for nothing.
        #[arg(long)]
        dry_run: bool,
    },
}

/// How many messages are read at a time. Their payloads are read too.
const PART: NonZeroU32 = NonZeroU32::new(100).unwrap();

pub(crate) async fn run(store: &StoreOptions, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    let parking = store.parking().await?;
    match &options.what {
        What::List { subscriber, limit } => list(&*parking, subscriber, *limit, json).await,
        What::Replay { subscriber, ids, all, dry_run } => {
            let wanted = if *all { None } else { Some(&ids[..]) };
            replay(&*parking, subscriber, wanted, *dry_run, json).await
        }
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

/// Requests replays of these messages, or of all.
async fn replay(
    parking: &dyn Parking,
    subscriber: &str,
    wanted: Option<&[String]>,
    dry_run: bool,
    json: bool,
) -> Result<Ended, Box<dyn Error>> {
    let (mut requested, mut found, mut gone, mut last) = (0_u64, Vec::new(), Vec::new(), None);
    loop {
        let messages = parking.list(subscriber, false, last.as_ref(), PART).await?;
        for parked in &messages {
            let id = &parked.message.id;
            if wanted.is_some_and(|wanted| !wanted.contains(id)) {
                continue;
            }
            show(parked, json);
            found.push(id.clone());
            if dry_run || parked.is_requested {
                continue;
            }
            match parking.request_replay(subscriber, &parked.message.parking_key()).await? {
                true => requested += 1,
                false => gone.push(id.clone()),
            }
        }
        // A part with a row that cannot be read is shorter, and not the last.
        let Some(next) = messages.into_iter().next_back() else { break };
        last = Some(next);
    }
    let missing: Vec<_> = wanted.unwrap_or_default().iter().filter(|id| !found.contains(id)).collect();
    missing.iter().for_each(|id| eprintln!("not parked: {}", printable(id)));
    gone.iter().for_each(|id| eprintln!("not parked any more, or requested by another command: {}", printable(id)));
    let (parked, gone) = (found.len() - gone.len(), gone.len());
    match json {
        true => say_json(&json!({ "found": parked, "requested": requested, "gone": gone })),
        false => say(&format!("{parked} parked, {requested} replays requested")),
    }
    Ok(if missing.is_empty() && gone == 0 { Ended::Done } else { Ended::Unchanged })
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
