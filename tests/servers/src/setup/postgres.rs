//! The setup of Postgres.

/// The environment variable that names the image.
pub const IMAGE_VARIABLE: &str = "IDEM_POSTGRES_IMAGE";

/// The default image.
pub const IMAGE: &str = "postgres:17";

/// Turns passwords off.
pub const ENVIRONMENT: (&str, &str) = ("POSTGRES_HOST_AUTH_METHOD", "trust");

/// A command in a container that succeeds when the server accepts connections. It uses TCP, because the image initialises its
/// data with a server that has only a socket.
pub const IS_READY: [&str; 3] = ["pg_isready", "--host=127.0.0.1", "--username=postgres"];
