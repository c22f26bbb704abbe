//! How many connections a process may have.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Raises the number of files that this process and its children may open to what the system allows: a thousand clients at once
/// are more than most shells permit. Cases say which of them lack it.
pub fn allow_many_connections() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
