//! An operation as the journal keeps it.

use http::header::{AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION, SET_COOKIE};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use idem_core::{BodyFormat, FingerprintBuilder};
use reqwest::{Request, Url};
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::error::{JournalError, JournalErrorKind, of_sqlite};
use crate::keep::Beginning;

/// What is sent.
pub(super) struct Entry {
    pub(super) method: String,
    pub(super) url: String,
    pub(super) headers: Vec<u8>,
    pub(super) body: Vec<u8>,
    pub(super) key: String,
    pub(super) bare_key: bool,
    pub(super) label: Option<String>,
}

impl Entry {
    /// Everything of a request but its secrets.
    pub(super) fn of(operation: &Beginning<'_>, body: &[u8]) -> Result<Self, serde_json::Error> {
        let Beginning { request, key, label, rules, .. } = operation;
        let mut url = request.url().clone();
        // They fail only for a URL without a host, which has neither.
        let _ = (url.set_username(""), url.set_password(None));
        let headers = encode_headers(request.headers())?;
        let method = request.method().as_str().to_owned();
        let (key, label) = (key.as_str().to_owned(), label.map(str::to_owned));
        Ok(Self { method, url: url.into(), headers, body: body.to_owned(), key, bare_key: rules.bare_key, label })
    }

    /// Reads a row, and refuses it if it is not what was written.
    pub(super) fn read(row: &SqliteRow) -> Result<Self, JournalError> {
        let failed = |error| of_sqlite("read an operation", error);
        let entry = Self {
            method: row.try_get("method").map_err(failed)?,
            url: row.try_get("url").map_err(failed)?,
            headers: row.try_get("headers").map_err(failed)?,
            body: row.try_get("body").map_err(failed)?,
            key: row.try_get("key").map_err(failed)?,
            bare_key: row.try_get("bare_key").map_err(failed)?,
            label: row.try_get("label").map_err(failed)?,
        };
        let digest: Vec<u8> = row.try_get("digest").map_err(failed)?;
        if digest == entry.digest() { Ok(entry) } else { Err(damaged()) }
    }

    pub(super) fn digest(&self) -> [u8; 32] {
        let mut builder = FingerprintBuilder::new(BodyFormat::Raw);
        let Self { method, url, headers, body, key, bare_key, label } = self;
        let form: &[u8] = if *bare_key { b"bare" } else { b"quoted" };
        for (name, value) in
            [("method", method.as_bytes()), ("url", url.as_bytes()), ("headers", headers), ("key", key.as_bytes())]
        {
            builder.field(name, value);
        }
        builder.field("form", form);
        if let Some(label) = label {
            builder.field("label", label.as_bytes());
        }
        builder.body(body);
        *builder.finish().digest()
    }

    /// The request as it was sent, without its key and its secrets.
    pub(super) fn request(self) -> Result<Request, JournalError> {
        let method = Method::from_bytes(self.method.as_bytes()).map_err(|_| damaged())?;
        let url: Url = self.url.parse().map_err(|_| damaged())?;
        let mut request = Request::new(method, url);
        *request.headers_mut() = decode_headers(&self.headers).ok_or_else(damaged)?;
        *request.body_mut() = (!self.body.is_empty()).then(|| self.body.into());
        Ok(request)
    }
}

pub(super) fn damaged() -> JournalError {
    let message =
        "an operation of the journal is damaged, so it is not sent; find out from the resource itself, and forget it";
    JournalError::new(JournalErrorKind::Corrupt, message)
}

/// Header fields without credentials: those with names that mean credentials, and those that are marked as sensitive.
pub(super) fn encode_headers(headers: &HeaderMap) -> Result<Vec<u8>, serde_json::Error> {
    const SECRETS: [HeaderName; 4] = [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION, SET_COOKIE];
    let kept = headers.iter().filter(|(name, value)| !SECRETS.contains(name) && !value.is_sensitive());
    let fields: Vec<(&str, &[u8])> = kept.map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    serde_json::to_vec(&fields)
}

pub(super) fn decode_headers(encoded: &[u8]) -> Option<HeaderMap> {
    let fields: Vec<(String, Vec<u8>)> = serde_json::from_slice(encoded).ok()?;
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_bytes(&value).ok()?);
    }
    Some(headers)
}
