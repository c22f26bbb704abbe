//! The setup of Redis.

/// The environment variable that names the image.
pub const IMAGE_VARIABLE: &str = "IDEM_REDIS_IMAGE";

/// The default image.
pub const IMAGE: &str = "redis:7";

/// The number of primaries of a cluster.
pub const PRIMARIES: usize = 3;

/// The number of nodes of a cluster: each primary has one replica.
pub const NODES: usize = 2 * PRIMARIES;

/// Nothing is written to disk, and nothing is evicted.
const SETTINGS: [&str; 6] = ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"];

/// The arguments of a server. Those of the caller come last, so they win.
#[must_use]
pub fn arguments<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    SETTINGS.into_iter().chain(settings.iter().copied()).collect()
}

/// The command of a container. Protected mode is off: Redis cannot know that only this machine and neighbouring containers
/// reach its port.
#[must_use]
pub fn command<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    ["redis-server", "--protected-mode", "no"].into_iter().chain(arguments(settings)).collect()
}
