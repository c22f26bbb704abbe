//! PgBouncer in front of Postgres, in transaction mode.

/// The `pgbouncer.ini` for an `address` to listen at, with `pool_size` connections for each of `databases`. If `settings`
/// repeat a name, the last one counts.
///
/// There is no `ignore_startup_parameters` and nothing else that helps a client: the store must work behind a PgBouncer that
/// knows nothing of the application. Without a Unix socket, a port that is in use is an error and not a warning.
#[must_use]
pub fn configuration(databases: &str, address: (&str, u16), pool_size: u16, settings: &[&str]) -> String {
    let (host, port) = address;
    format!(
        "[databases]\n{databases}\n\n[pgbouncer]\nlisten_addr = {host}\nlisten_port = {port}\nunix_socket_dir =\n\
         auth_type = any\npool_mode = transaction\ndefault_pool_size = {pool_size}\nmax_client_conn = 500\n{}\n",
        settings.join("\n")
    )
}
