//! Connections by TLS, with certificates that the tests make.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use idem_servers::{Postgres, Redis};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::{Ran, ran};

/// An authority, and a server's certificate for 127.0.0.1 that it has signed.
pub(crate) struct Certificates {
    folder: TempDir,
    pub(crate) authority: PathBuf,
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

impl Certificates {
    pub(crate) fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        // Another name for each, or the signature would be what is wrong.
        params.distinguished_name.push(DnType::CommonName, folder.path().display().to_string());
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap().pem();
        let file = |name: &str, text: String| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let (authority, certificate) = (file("authority.pem", authority), file("server.pem", certificate));
        Self { authority, certificate, key: file("server.key", key.serialize_pem()), folder }
    }

    /// Runs `idem check`, trusting this authority alone.
    pub(crate) fn check(url: &str, authority: &Path) -> Ran {
        let mut command = Command::new(env!("CARGO_BIN_EXE_idem"));
        ran(command.args(["--store", url, "check"]).env("SSL_CERT_FILE", authority).env_remove("SSL_CERT_DIR"))
    }
}

#[test]
fn postgres_is_reached_by_tls_and_an_unknown_authority_is_named() {
    let (own, other) = (Certificates::new(), Certificates::new());
    let server = Postgres::start().unwrap();
    let psql = |sql: &str| {
        assert!(Command::new("psql").args([&*server.url(), "-qc", sql]).output().unwrap().status.success(), "{sql}");
    };
    // The server may belong to another user, so it writes its files itself.
    for (name, path) in [("server.crt", &own.certificate), ("server.key", &own.key)] {
        let text = STANDARD.encode(std::fs::read(path).unwrap());
        psql(&format!("COPY (SELECT '{text}') TO PROGRAM 'base64 -d > {name} && chmod 600 {name}'"));
    }
    psql("ALTER SYSTEM SET ssl = on");
    psql("SELECT pg_reload_conf()");
    let url = format!("{}?sslmode=verify-full", server.url());
    // The server reads its settings again in its own time.
    while Certificates::check(&url, &own.authority).stderr.contains("does not support TLS") {}
    let unmigrated = Certificates::check(&url, &own.authority).expect(4);
    assert!(unmigrated.stdout.contains("migrat"), "{}", unmigrated.stdout);
    let by_url = format!("{url}&sslrootcert={}", own.authority.display());
    Certificates::check(&by_url, &other.authority).expect(4);
    let refused = Certificates::check(&url, &other.authority);
    assert!(refused.code != 0 && refused.text().contains("UnknownIssuer"), "{}", refused.text());
    // Another name than that of the certificate.
    let other_name = Certificates::check(&url.replace("127.0.0.1", "localhost"), &own.authority);
    assert!(other_name.code != 0 && other_name.text().contains("not valid for name"), "{}", other_name.text());
}

#[test]
fn redis_is_reached_by_tls_and_an_unknown_authority_is_named() {
    let (own, other) = (Certificates::new(), Certificates::new());
    let server = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let settings = [
        "tls-cert-file",
        &path(&own.certificate),
        "tls-key-file",
        &path(&own.key),
        "tls-ca-cert-file",
        &path(&own.authority),
        "tls-auth-clients",
        "no",
        "tls-port",
        &port,
    ];
    let mut set = Command::new("redis-cli");
    let set = ran(set.args(["-p", &server.port().to_string(), "CONFIG", "SET"]).args(settings));
    assert_eq!(set.stdout.trim(), "OK", "{}", set.stderr);
    let url = format!("rediss://127.0.0.1:{port}");
    Certificates::check(&url, &own.authority).expect(0);
    let refused = Certificates::check(&url, &other.authority);
    assert!(refused.code != 0 && refused.text().contains("UnknownIssuer"), "{}", refused.text());
    drop(own.folder);
}
