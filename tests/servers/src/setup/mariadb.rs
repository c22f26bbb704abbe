//! The setup of MariaDB.

/// The environment variable that names the image.
pub const IMAGE_VARIABLE: &str = "IDEM_MARIADB_IMAGE";

/// The default image.
pub const IMAGE: &str = "mariadb:11.8";

/// The user `root` without a password, also from other hosts, and the database `test`.
pub const ENVIRONMENT: &[(&str, &str)] =
    &[("MARIADB_ALLOW_EMPTY_ROOT_PASSWORD", "1"), ("MARIADB_ROOT_HOST", "%"), ("MARIADB_DATABASE", "test")];

/// By TCP: the official image first starts a server without it, to make the data.
pub const IS_READY: &[&str] =
    &["mariadb-admin", "--no-defaults", "--protocol=tcp", "--host=127.0.0.1", "--user=root", "ping"];
