//! Which processes use a journal: each holds a lock of the operating system on a separate file beside the journal.
//!
//! The kernel drops the lock when the process ends, however it ends. So no clock decides whether an owner is alive. A lease in
//! the database would end early when the clock jumps, while its owner still sends.
//!
//! Files are made, and those of dead owners removed, only under the write lock of the database, so that no other process can
//! remove a file between its making and its locking. An owner removes its file when it ends.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use uuid::Uuid;

/// This process among the users of a journal.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) id: String,
    path: PathBuf,
    /// Locked while this value lives.
    _lock: File,
}

impl Owner {
    /// Makes the file of a new owner.
    pub(super) fn register(journal: &Path) -> io::Result<Self> {
        let id = Uuid::new_v4().simple().to_string();
        let path = path_of(journal, &id);
        let lock = OpenOptions::new().write(true).create_new(true).open(&path)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { id, path, _lock: lock }),
            Err(TryLockError::Error(error)) => Err(error),
            Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // An owner without a file counts as dead, and this one sends nothing any more.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether the process of an owner lives. An error means that it is not known.
pub(super) fn is_alive(journal: &Path, owner: &str) -> io::Result<bool> {
    match File::open(path_of(journal, owner)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
        // Shared, so that two processes that look at once do not take each other for the owner.
        Ok(file) => match file.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error),
        },
    }
}

/// Removes the files of owners that have died.
pub(super) fn remove_dead(journal: &Path) -> io::Result<()> {
    let folder = journal.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let prefix = prefix_of(journal);
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(owner) = name.strip_prefix(&prefix)
            && Uuid::try_parse(owner).is_ok()
            && !is_alive(journal, owner)?
        {
            match std::fs::remove_file(entry.path()) {
                // Its owner has ended just now, and has removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed?,
            }
        }
    }
    Ok(())
}

fn prefix_of(journal: &Path) -> String {
    format!("{}-owner-", journal.file_name().unwrap_or_default().to_string_lossy())
}

fn path_of(journal: &Path, owner: &str) -> PathBuf {
    journal.with_file_name(format!("{}{owner}", prefix_of(journal)))
}
