//! The data of a new server, made once for all servers of a test run.

use std::path::PathBuf;

use tempfile::TempDir;

use super::{IMAGE, cluster};
use crate::account::Account;
use crate::keeper::Keeper;
use crate::{Error, programs};

/// The data of a server that was never started.
///
/// If [`TEMPLATE_VARIABLE`](crate::TEMPLATE_VARIABLE) names its [path](Self::path), a new [`Postgres`](super::Postgres) copies
/// it, which takes a tenth of the time of `initdb`.
///
/// It is removed when the value is dropped, and when its process ends.
#[derive(Debug)]
pub struct PostgresTemplate {
    // Dropped before the folder, which the keeper removes.
    _keeper: Keeper,
    folder: TempDir,
}

impl PostgresTemplate {
    /// Makes the template; `None` if servers run in containers.
    ///
    /// # Errors
    ///
    /// If `initdb` fails, with what it printed.
    pub fn make() -> Result<Option<PostgresTemplate>, Error> {
        let Some(binaries) = programs::postgres_folder().filter(|_| !IMAGE.is_named()) else { return Ok(None) };
        let binaries = cluster::resolved(&binaries)?;
        let folder = TempDir::with_prefix("idem-postgres-").map_err(Error::io("make a temporary folder"))?;
        let account = Account::for_owner_of(folder.path())?;
        let mut keeper = Keeper::start(account, folder.path(), "", [binaries.join("postgres").into()])?;
        cluster::Data::New.fill(&mut keeper, &binaries)?;
        Ok(Some(PostgresTemplate { _keeper: keeper, folder }))
    }

    /// The folder with the data.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("data")
    }
}
