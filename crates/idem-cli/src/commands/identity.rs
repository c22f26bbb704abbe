//! `idem new-identity`.

use std::error::Error;

use clap::Args;
use idem_core::{OwnerToken, RecordId, RepairNote};

use crate::Ended;
use crate::commands::confirm::{confirmed, expect_reason};
use crate::output::say;
use crate::store::Store;

/// What has happened to the database.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Nothing was lost, as in a failover to a synchronous standby: keeps the identity, and only remembers the history of the server.
    #[arg(long)]
    keep: bool,
    /// Why. It stays in the store.
    #[arg(long)]
    reason: String,
    /// Who asks for it. Default: the user of this machine.
    #[arg(long, env = "USER", default_value = "unknown")]
    actor: String,
    /// Does not ask.
    #[arg(long)]
    yes: bool,
}

const WARNING: &str = "Copies in Redis are not valid any more after this, and each process of the application has to be started again. \
    Stop all of them first: a process that keeps the old identity takes other locks, and both could run one operation. On Postgres this \
    command refuses while it sees other sessions of the database; a process without a session is not seen. For a file of SQLite \
    and for MariaDB nothing looks for other processes.";

/// What stands for each record in the note.
const EACH_RECORD: RecordId = RecordId::from_bytes([0; 32]);

pub(crate) async fn run(store: &dyn Store, options: &Options) -> Result<Ended, Box<dyn Error>> {
    expect_reason(&options.reason)?;
    if !options.keep {
        eprintln!("{WARNING}");
        if !options.yes && !confirmed("give --yes when all processes have stopped")? {
            eprintln!("nothing was changed");
            return Ok(Ended::Unchanged);
        }
    }
    let note = RepairNote {
        action: OwnerToken::random(),
        record: EACH_RECORD,
        actor: options.actor.clone(),
        reason: options.reason.clone(),
        resolution: if options.keep { "identity kept" } else { "new identity" }.to_owned(),
        outcome: None,
    };
    store.note(&note).await?;
    let renewed = store.renew_identity(options.keep).await;
    let outcome = if renewed.is_ok() { "done" } else { "failed" };
    store.note(&RepairNote { outcome: Some(outcome.to_owned()), ..note }).await?;
    renewed?;
    say(if options.keep { "the history of the server is remembered" } else { "the records have a new identity" });
    Ok(Ended::Done)
}
