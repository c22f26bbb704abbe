//! Compares two multipart bodies with the parsers of axum and actix-web.

use std::fmt::Write;
use std::io;

use actix_web::error::PayloadError;
use actix_web::http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use arbitrary::{Result, Unstructured};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, stream};

use super::{Reader, Sent, changed};

pub(super) const READERS: &[Reader] = &[("multer", by_multer), ("actix-multipart", by_actix)];

/// Boundaries, some of which begin like others, or end like a final delimiter. All have at least four characters: with shorter
/// ones actix-multipart panics over short lines of a preamble, which ends a fuzzer.
const BOUNDARIES: [&str; 12] = [
    "abcd",
    "abcdabcd",
    "abcd-",
    "-abcd",
    "----",
    "abcd--",
    "ABCD",
    "=abcd",
    "abcd'+_.",
    "abcd abcd",
    "abcd;c",
    "abcd/(1):?,",
];

/// Content types; the tilde stands for the boundary.
const TYPES: [&str; 11] = [
    "multipart/form-data; boundary=~",
    "multipart/form-data; boundary=\"~\"",
    "multipart/form-data;BOUNDARY=~",
    "Multipart/Form-Data; boundary=~",
    "multipart/form-data; boundary =~",
    "multipart/form-data; boundary= ~",
    "multipart/form-data; boundary=~ ",
    "multipart/form-data ; boundary=~",
    "multipart/form-data; boundary=~; charset=latin1",
    "multipart/form-data; boundary=abcde; boundary=~",
    "multipart/mixed; boundary=~",
];

/// `~` stands for the boundary of this body, and `^` for that of the other body.
const PIECES: &[&[u8]] = &[
    b"--~\r\n",
    b"\r\n--~\r\n",
    b"\r\n--~--",
    b"\r\n--~--\r\n",
    b"--~",
    b"--^",
    b"\r--~\r\n",
    b"\n--~\r\n",
    b"\r\n--^\r\n",
    b"\r--^\r\n",
    b"\n--^\r\n",
    b"\r\n--^--\r\n",
    b"\r--^--",
    b"\r\n",
    b"\r",
    b"\n",
    b"-",
    b"--",
    b" ",
    b"\t",
    b"",
    b"\0",
    b"\xC3\xA9",
    b"\xFF",
    b"value",
    b"preamble\r\n",
    b"\r\n\r\n",
    b"\r\n--~ \r\n",
    b"\r\n--~x\r\n",
    b"\r\n --~\r\n",
    b"Content-Disposition: form-data; name=\"a\"\r\n\r\n",
    b"Content-Disposition: form-data; name=\"b\"; filename=\"f\"\r\n\r\n",
    b"; filename*=UTF-8''%e2%82%ac",
    b"Content-Type: text/plain; charset=utf-16\r\n",
    b"Content-Transfer-Encoding: base64\r\n",
    b"Content-Length: 3\r\n",
    b"content-disposition: form-data; name=_charset_\r\n\r\n",
];

pub(super) fn two(input: &mut Unstructured<'_>) -> Result<(Sent, Sent)> {
    let (one, other) = (*input.choose(&BOUNDARIES)?, *input.choose(&BOUNDARIES)?);
    let (one_type, other_type) = (*input.choose(&TYPES)?, *input.choose(&TYPES)?);
    let other_type = if input.ratio(3, 4)? { one_type } else { other_type };
    let mut pattern = b"--~\r\n".to_vec();
    for _ in 0..input.int_in_range(0..=3)? {
        pattern.extend(b"Content-Disposition: form-data; name=\"a\"\r\n\r\n");
        for _ in 0..input.int_in_range(0..=3)? {
            pattern.extend_from_slice(input.choose(PIECES)?);
        }
        pattern.extend(b"\r\n--~\r\n");
    }
    pattern.truncate(pattern.len() - 2);
    pattern.extend_from_slice(input.choose(&[b"--\r\n".as_slice(), b"--", b"--\r\n", b"", b"--\r\nepilogue"])?);
    let pattern = changed(pattern, PIECES, input)?;
    let another = if input.ratio(1, 3)? { changed(pattern.clone(), PIECES, input)? } else { pattern.clone() };
    let sent = |content_type: &str, pattern: &[u8], boundary: &str, the_other: &str| Sent {
        content_type: content_type.replace('~', boundary),
        body: with_boundaries(pattern, boundary, the_other),
    };
    // The placeholders mean the same in both bodies, or each body has the boundary of the other.
    let the_other = if input.ratio(1, 2)? { other } else { one };
    Ok((sent(one_type, &pattern, one, other), sent(other_type, &another, other, the_other)))
}

fn with_boundaries(pattern: &[u8], boundary: &str, other: &str) -> Vec<u8> {
    let mut body = Vec::new();
    for &byte in pattern {
        match byte {
            b'~' => body.extend_from_slice(boundary.as_bytes()),
            b'^' => body.extend_from_slice(other.as_bytes()),
            _ => body.push(byte),
        }
    }
    body
}

fn by_multer(sent: &Sent) -> String {
    let reading = async {
        let Ok(boundary) = multer::parse_boundary(&sent.content_type) else { return "no boundary".to_owned() };
        let body = stream::iter([Ok::<_, io::Error>(Bytes::copy_from_slice(&sent.body))]);
        let (mut multipart, mut read) = (multer::Multipart::new(body, boundary), String::new());
        loop {
            match multipart.next_field().await {
                Ok(Some(mut field)) => {
                    let _ = write!(read, "{:?} {:?} {:?} ", field.headers(), field.name(), field.file_name());
                    while let Some(chunk) = field.next().await {
                        match chunk {
                            Ok(chunk) => read.push_str(&chunk.escape_ascii().to_string()),
                            Err(_) => return read + " broken",
                        }
                    }
                    read.push('\n');
                }
                Ok(None) => return read + "end",
                Err(_) => return read + "error",
            }
        }
    };
    reading.now_or_never().unwrap_or_else(|| "waits".to_owned())
}

fn by_actix(sent: &Sent) -> String {
    let reading = async {
        let Ok(content_type) = HeaderValue::from_str(&sent.content_type) else { return "no header".to_owned() };
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, content_type);
        let body = stream::iter([Ok::<_, PayloadError>(Bytes::copy_from_slice(&sent.body))]);
        let (mut multipart, mut read) = (actix_multipart::Multipart::new(&headers, body), String::new());
        while let Some(field) = multipart.next().await {
            let Ok(mut field) = field else { return read + "error" };
            let mut lines: Vec<String> = field.headers().iter().map(|line| format!("{line:?}")).collect();
            lines.sort();
            let _ = write!(read, "{lines:?} {:?} {:?} ", field.name(), field.content_type());
            while let Some(chunk) = field.next().await {
                match chunk {
                    Ok(chunk) => read.push_str(&chunk.escape_ascii().to_string()),
                    Err(_) => return read + " broken",
                }
            }
            read.push('\n');
        }
        read + "end"
    };
    reading.now_or_never().unwrap_or_else(|| "waits".to_owned())
}
