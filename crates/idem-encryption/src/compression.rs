//! Compression of a plaintext (DEFLATE, RFC 1951).

use std::io::{Read as _, Write as _};

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;

use crate::fault::Fault;

/// The longest plaintext that is compressed, and so the most that an opened value grows to: 1 MiB, the stored response that the HTTP
/// layers keep by default. Compression runs on the task of the request, which must not keep its thread for long.
const LONGEST: usize = 1 << 20;

/// The compressed form, if it is shorter.
pub(crate) fn compress(plaintext: &[u8]) -> Option<Vec<u8>> {
    if plaintext.len() > LONGEST {
        return None;
    }
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(plaintext).ok()?;
    encoder.finish().ok().filter(|compressed| compressed.len() < plaintext.len())
}

pub(crate) fn decompress(compressed: &[u8]) -> Result<Vec<u8>, Fault> {
    let mut plaintext = Vec::new();
    let mut decoder = DeflateDecoder::new(compressed).take(LONGEST as u64 + 1);
    decoder.read_to_end(&mut plaintext).map_err(|_| Fault::Damaged("its compressed content"))?;
    if plaintext.len() > LONGEST {
        return Err(Fault::Damaged("its compressed content is longer than 1 MiB"));
    }
    Ok(plaintext)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_compressed_only_if_that_makes_it_shorter() {
        let long = vec![b'a'; 10_000];
        let compressed = compress(&long).unwrap();
        assert!(compressed.len() < 100);
        assert_eq!(decompress(&compressed).unwrap(), long);
        assert_eq!(compress(b"short"), None);
        assert_eq!(compress(b""), None);
    }

    #[test]
    fn a_value_does_not_grow_beyond_the_longest() {
        let bomb = |length| {
            let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
            encoder.write_all(&vec![0; length]).unwrap();
            encoder.finish().unwrap()
        };
        assert_eq!(decompress(&bomb(LONGEST)).unwrap().len(), LONGEST);
        assert!(matches!(decompress(&bomb(LONGEST + 1)), Err(Fault::Damaged(_))));
        assert_eq!(LONGEST, 1_048_576, "more would keep a thread of the runtime");
        assert!(compress(&vec![0; LONGEST]).is_some());
        assert_eq!(compress(&vec![0; LONGEST + 1]), None, "it could not be opened again");
    }

    #[test]
    fn arbitrary_bytes_are_an_error_or_a_value() {
        for length in 0..200_u8 {
            let bytes: Vec<u8> = (0..length).map(|byte| byte.wrapping_mul(101).wrapping_add(length)).collect();
            let _ = decompress(&bytes);
        }
        assert!(decompress(b"\xFF\xFF\xFF").is_err());
    }
}
