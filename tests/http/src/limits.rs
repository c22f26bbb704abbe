//! The limit on connections of a process.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises the limit of open files, for this process and its children, to the system's maximum. Most shells permit too few for a
/// thousand concurrent clients.
pub fn allow_many_connections() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
