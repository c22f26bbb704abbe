//! Finds programs.

use std::path::{Path, PathBuf};

/// Folders where distributions put servers that are not on every user's PATH.
const SYSTEM: [&str; 2] = ["/usr/sbin", "/usr/local/sbin"];

/// Debian has one folder for each version of Postgres, and only wrappers of the clients on PATH.
const VERSIONS: &str = "/usr/lib/postgresql";

/// Finds a program on PATH, else in Debian's folder of the newest Postgres, else among the system's servers.
#[must_use]
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(newest_first()).chain(SYSTEM.map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// The folder with both `initdb` and `postgres`, which must be of one version.
pub(crate) fn postgres_folder() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&path).chain(newest_first());
    folders.find(|folder| ["initdb", "postgres"].iter().all(|name| folder.join(name).is_file()))
}

fn newest_first() -> Vec<PathBuf> {
    let versions = Path::new(VERSIONS).read_dir().into_iter().flatten().flatten();
    let mut versions: Vec<(u32, PathBuf)> = versions
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .collect();
    versions.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
    versions.into_iter().map(|(_, folder)| folder).collect()
}
