//! Redis.

/// The environment variable that names the image.
pub const IMAGE_VARIABLE: &str = "IDEM_REDIS_IMAGE";

/// The image if none is named.
pub const IMAGE: &str = "redis:7";

/// How many primaries a cluster has.
pub const PRIMARIES: usize = 3;

/// How many nodes a cluster has: a replica for each primary.
pub const NODES: usize = 2 * PRIMARIES;

/// Nothing is written to the disk, and nothing is thrown away.
const SETTINGS: [&str; 6] = ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"];

/// Arguments of a server; those of the caller win, as they come last.
#[must_use]
pub fn arguments<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    SETTINGS.into_iter().chain(settings.iter().copied()).collect()
}

/// The command of a container. Only this machine and containers beside it reach its port, which a Redis without password cannot
/// know.
#[must_use]
pub fn command<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    ["redis-server", "--protected-mode", "no"].into_iter().chain(arguments(settings)).collect()
}
