//! Where the next page of a list begins, sealed: the position may be the id of another tenant's record.

use aes_gcm_siv::aead::{Aead as _, KeyInit as _, Payload};
use aes_gcm_siv::{Aes256GcmSiv, Nonce};
use idem_core::{OwnerToken, ScanPosition};

use crate::access::Tenant;
use crate::forgery::Secret;

const NONCE: usize = 12;

/// The position for the link to the next page, for this tenant only. Empty if it cannot be sealed, which does not happen.
pub(crate) fn seal(secret: &Secret, tenant: Option<&Tenant>, position: &ScanPosition) -> String {
    // 90 random bits at least.
    let mut nonce = [0; NONCE];
    nonce.copy_from_slice(&OwnerToken::random().as_bytes()[..NONCE]);
    let payload = Payload { msg: position.as_bytes(), aad: &whose(tenant) };
    let sealed = cipher(secret).encrypt(&Nonce::from(nonce), payload).unwrap_or_default();
    nonce.iter().chain(&sealed).map(|byte| format!("{byte:02x}")).collect()
}

/// The position of a link; `None` if the link is damaged, or of another tenant or console.
pub(crate) fn open(secret: &Secret, tenant: Option<&Tenant>, text: &str) -> Option<ScanPosition> {
    let bytes = text.as_bytes().chunks(2).map(|pair| {
        let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2 && !pair.starts_with('+'))?;
        u8::from_str_radix(pair, 16).ok()
    });
    let bytes = bytes.collect::<Option<Vec<_>>>()?;
    let (nonce, sealed) = bytes.split_first_chunk::<NONCE>()?;
    let payload = Payload { msg: sealed, aad: &whose(tenant) };
    cipher(secret).decrypt(&Nonce::from(*nonce), payload).ok().map(ScanPosition::from_bytes)
}

fn cipher(secret: &Secret) -> Aes256GcmSiv {
    Aes256GcmSiv::new(&secret.key("cursor").into())
}

fn whose(tenant: Option<&Tenant>) -> Vec<u8> {
    let Some(Tenant { namespace, principal }) = tenant else { return Vec::new() };
    [&(namespace.len() as u64).to_be_bytes(), namespace.as_bytes(), principal.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_for_one_tenant_of_one_console() {
        let tenant = |principal: &str| Tenant { namespace: "app".into(), principal: principal.into() };
        let (secret, own, other) = (Secret::new(b"secret").unwrap(), tenant("own"), tenant("other"));
        let position = ScanPosition::from_bytes([7; 32]);
        let text = seal(&secret, Some(&own), &position);
        assert!(!text.contains(&"07".repeat(4)), "{text}");
        assert_eq!(open(&secret, Some(&own), &text), Some(position));
        assert_eq!(open(&secret, Some(&other), &text), None);
        assert_eq!(open(&secret, None, &text), None);
        assert_eq!(open(&Secret::new(b"another").unwrap(), Some(&own), &text), None);
        for damaged in ["", "0", "xx", "+1", "ä", &"07".repeat(32), &text[2..], &format!("{text}00")] {
            assert_eq!(open(&secret, Some(&own), damaged), None, "{damaged}");
        }
    }
}
