//! The server behind PgBouncer, parsed from a URL.

use crate::Error;

/// The parts of `postgres://user:password@host:port/database?sslmode=…`.
#[derive(Debug, PartialEq)]
pub(crate) struct Upstream {
    /// The user, percent-encoded as in the URL.
    pub(crate) user: String,
    password: Option<String>,
    host: String,
    port: u16,
    /// The database, percent-encoded as in the URL.
    pub(crate) database: String,
    sslmode: Option<String>,
}

impl Upstream {
    pub(crate) fn parse(url: &str) -> Result<Upstream, Error> {
        let rest = url.strip_prefix("postgres://").or_else(|| url.strip_prefix("postgresql://"));
        let refused = |what: &str| Error::failed(format!("{what}: expected postgres://user@host:port/database"));
        let rest = rest.ok_or_else(|| refused("not the URL of a Postgres server"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, address) = authority.rsplit_once('@').unwrap_or(("postgres", authority));
        let (user, password) = login.split_once(':').map_or((login, None), |(user, word)| (user, Some(word)));
        // An IPv6 address is in brackets because of its colons.
        let (host, port) = match address.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| refused("no port"))?),
            _ => (address, 5432),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(refused("the URL has no host"));
        }
        Ok(Upstream {
            user: user.into(),
            password: password.map(decode),
            host: decode(host),
            port,
            // The default database is named like the user, as in libpq.
            database: if database.is_empty() { user } else { database }.into(),
            sslmode: query.split('&').find_map(|pair| pair.strip_prefix("sslmode=")).map(str::to_owned),
        })
    }

    /// A line of `[databases]` that maps every database to this server and every client to this user.
    pub(crate) fn databases(&self) -> String {
        let (host, user) = (quote(&self.host), quote(&decode(&self.user)));
        let password = self.password.as_deref().map(|password| format!(" password={}", quote(password)));
        format!("* = host={host} port={} user={user}{}", self.port, password.unwrap_or_default())
    }

    /// The line of `[pgbouncer]` about encryption, if the URL has `sslmode`.
    pub(crate) fn encryption(&self) -> String {
        self.sslmode.as_deref().map(|mode| format!("server_tls_sslmode = {mode}")).unwrap_or_default()
    }
}

fn quote(value: &str) -> String {
    format!("'{}'", value.replace('\'', "''"))
}

/// Decodes percent-encoding. Invalid sequences stay as they are.
fn decode(text: &str) -> String {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, tail @ ..] = rest {
        let encoded = (*byte == b'%').then(|| tail.get(..2)).flatten();
        let value = encoded.and_then(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
        decoded.push(value.unwrap_or(*byte));
        rest = if value.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests {
    use super::Upstream;

    #[test]
    fn the_parts_of_a_url_become_the_line_of_a_database() {
        let upstream =
            Upstream::parse("postgresql://a%40b:it's%20100%25@db.example:6543/shop?sslmode=require").unwrap();
        assert_eq!(upstream.databases(), "* = host='db.example' port=6543 user='a@b' password='it''s 100%'");
        assert_eq!(upstream.encryption(), "server_tls_sslmode = require");
        assert_eq!((upstream.user.as_str(), upstream.database.as_str()), ("a%40b", "shop"));
    }

    #[test]
    fn what_a_url_leaves_out_is_the_default_of_postgres() {
        let upstream = Upstream::parse("postgres://[::1]").unwrap();
        assert_eq!(upstream.databases(), "* = host='::1' port=5432 user='postgres'");
        assert_eq!(upstream.encryption(), "");
        assert_eq!(upstream.database, "postgres");
    }

    #[test]
    fn a_url_of_something_else_is_refused() {
        for url in
            ["sqlite://file.db", "postgres://", "postgres://user@:5432/", "postgres://host:port/", "127.0.0.1:5432"]
        {
            assert!(Upstream::parse(url).is_err(), "{url}");
        }
    }
}
