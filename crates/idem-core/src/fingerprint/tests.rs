use proptest::prelude::*;
use proptest::sample::Index;

use super::*;

/// 2,000 cases, or as many as `PROPTEST_CASES` says.
pub(super) fn config() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig { cases: asked.unwrap_or(2_000), ..ProptestConfig::default() }
}

fn in_chunks<'a>(format: &BodyFormat, chunks: impl IntoIterator<Item = &'a [u8]>) -> Fingerprint {
    let mut builder = FingerprintBuilder::new(format.clone());
    builder.field("method", b"POST");
    chunks.into_iter().for_each(|chunk| builder.body(chunk));
    builder.finish()
}

fn whole(format: &BodyFormat, body: &[u8]) -> Fingerprint {
    in_chunks(format, [body])
}

fn with_fields(fields: &[(&str, &str)]) -> Fingerprint {
    let mut builder = FingerprintBuilder::new(BodyFormat::Raw);
    fields.iter().for_each(|(name, value)| builder.field(name, value.as_bytes()));
    builder.finish()
}

fn hex(fingerprint: &Fingerprint) -> String {
    fingerprint.digest().iter().map(|byte| format!("{byte:02x}")).collect()
}

const MULTIPART: &[u8] =
    b"--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\none\r\n--b\r\nn: b\r\n\r\ntwo\r\n--b--\r\n";

/// Golden: these values are in users' stores. If this test fails, live retries turn into mismatches; a changed way of
/// making fingerprints needs a new [`Algorithm`].
#[test]
fn the_fingerprints_of_version_1_never_change() {
    let request = |format, body: &[u8]| {
        let mut builder = FingerprintBuilder::new(format);
        builder.field("method", b"POST");
        builder.field("path", b"/v1/payments");
        builder.field("query", b"");
        builder.body(body);
        hex(&builder.finish())
    };
    let json = b" { \"b\" : [1, 2.50, \"\\u00e9\"], \"a\": {\"y\": null, \"x\": true} } ";
    assert_eq!(
        hex(&FingerprintBuilder::new(BodyFormat::Raw).finish()),
        "3431e8f130ee2b89d5844b786a757c6120ee7bf3ddae3d488cfebd2c5490b043"
    );
    assert_eq!(
        hex(&Fingerprint::of_bytes("pay", b"hello")),
        "5c4714031030cdb9fd02e64b3e6487de0a1ee9377d44d619c01139bc1e6e4ccd"
    );
    assert_eq!(
        hex(&Fingerprint::of_json("pay", json)),
        "7f7ff074c395f9267ff75df720924eba6c63a2184474dafaf35ea156bf1b0f82"
    );
    assert_eq!(request(BodyFormat::json(), json), "36652a6c13f0da22563047961e51cd2ee3c84b4ad71df87f4f7ed747f2946ea0");
    assert_eq!(
        request(BodyFormat::json(), b"{\"a\":1,\"a\":1}"),
        "2991d438eaf8eb46d2c9e6c80b27e14b1abf47e27ce6c6461507af2bc469cbbf"
    );
    assert_eq!(
        request(BodyFormat::multipart(&b"b"[..]), MULTIPART),
        "12ba6c0818ca63de6ab6ed5610da8fd85bf2ffd2098dff09ee4f41afa28a7721"
    );
}

#[test]
fn moving_a_boundary_between_fields_changes_the_fingerprint() {
    let fingerprints = [
        with_fields(&[]),
        with_fields(&[("", "")]),
        with_fields(&[("ab", "c")]),
        with_fields(&[("a", "bc")]),
        with_fields(&[("", "abc")]),
        with_fields(&[("abc", "")]),
        with_fields(&[("a", ""), ("b", "c")]),
        with_fields(&[("b", "c"), ("a", "")]),
        with_fields(&[("ab", "c"), ("", "")]),
        with_fields(&[("ab", "cR")]),
    ];
    for (at, left) in fingerprints.iter().enumerate() {
        assert!(fingerprints[at + 1..].iter().all(|right| left != right), "entry {at} collides");
    }
}

#[test]
fn a_field_never_counts_as_a_part_of_the_body() {
    let mut builder = FingerprintBuilder::new(BodyFormat::Raw);
    builder.field("a", b"b");
    let field = builder.finish();
    let mut builder = FingerprintBuilder::new(BodyFormat::Raw);
    builder.body(b"F\0\0\0\0\0\0\0\x01a\0\0\0\0\0\0\0\x01b");
    assert_ne!(builder.finish(), field);
}

#[test]
fn forms_never_meet() {
    let json = BodyFormat::json();
    let text = b"{\"a\":1}";
    // Its own canonical form is not JSON, so it counts as raw bytes, and raw is another form.
    let canonical = b"{\"a\xFF#1,}";
    assert_ne!(whole(&json, canonical), whole(&json, text));
    assert_ne!(whole(&BodyFormat::Raw, canonical), whole(&json, text));
    assert_ne!(whole(&BodyFormat::Raw, text), whole(&json, text));
    assert_ne!(whole(&BodyFormat::Raw, MULTIPART), whole(&BodyFormat::multipart(&b"b"[..]), MULTIPART));
}

#[test]
fn what_a_format_does_not_understand_counts_byte_for_byte() {
    for doubtful in ["", "{", "{\"a\":1,\"a\":1}", "--b\r\n\r\nno end"] {
        let raw = whole(&BodyFormat::Raw, doubtful.as_bytes());
        assert_eq!(whole(&BodyFormat::json(), doubtful.as_bytes()), raw, "{doubtful:?}");
        // The same bytes may be other parts with another boundary, so that counts too.
        let [one, same, other] =
            [b"b", b"b", b"c"].map(|it| whole(&BodyFormat::multipart(&it[..]), doubtful.as_bytes()));
        let mut builder = FingerprintBuilder::new(BodyFormat::Raw);
        builder.field("method", b"POST");
        builder.field("boundary", b"b");
        builder.body(doubtful.as_bytes());
        assert_eq!((one, same), (builder.finish(), one), "{doubtful:?}");
        assert_ne!(one, other, "{doubtful:?}");
    }
    assert_ne!(whole(&BodyFormat::json(), b"{"), whole(&BodyFormat::json(), b"{ "));
}

#[test]
fn ignored_members_do_not_count() {
    let ignored = ["/sent_at".parse().unwrap()];
    let format = BodyFormat::Json { ignored: ignored.into() };
    assert_eq!(whole(&format, b"{\"sent_at\":1,\"sum\":5}"), whole(&format, b"{\"sum\":5,\"sent_at\":2}"));
    assert_ne!(whole(&format, b"{\"sent_at\":1,\"sum\":5}"), whole(&format, b"{\"sent_at\":1,\"sum\":6}"));
}

#[test]
fn the_boundary_of_a_multipart_body_does_not_count() {
    let renamed = String::from_utf8(MULTIPART.to_vec()).unwrap().replace("--b", "--another");
    let one = whole(&BodyFormat::multipart(&b"b"[..]), MULTIPART);
    assert_eq!(whole(&BodyFormat::multipart(&b"another"[..]), renamed.as_bytes()), one);
}

#[test]
fn operations_without_http_count_their_name_and_their_input() {
    assert_eq!(Fingerprint::of_bytes("pay", b"1"), Fingerprint::of_bytes("pay", b"1"));
    assert_ne!(Fingerprint::of_bytes("pay", b"1"), Fingerprint::of_bytes("refund", b"1"));
    assert_ne!(Fingerprint::of_bytes("pay", b"1"), Fingerprint::of_bytes("pay", b"2"));
    assert_eq!(Fingerprint::of_json("pay", b"[1]"), Fingerprint::of_json("pay", b" [ 1 ] "));
    assert_ne!(Fingerprint::of_bytes("pay", b"[1]"), Fingerprint::of_json("pay", b"[1]"));
}

#[test]
fn a_fingerprint_survives_a_store() {
    let fingerprint = Fingerprint::of_bytes("pay", b"1");
    let algorithm = Algorithm::from_number(fingerprint.algorithm().number());
    assert_eq!(algorithm, Algorithm::V1);
    assert_eq!(algorithm.number(), 1);
    assert_eq!(Algorithm::from_number(700).number(), 700);
    assert_eq!(Fingerprint::from_parts(algorithm, *fingerprint.digest()), fingerprint);
}

#[test]
fn equality_takes_the_whole_digest_and_the_algorithm() {
    let fingerprint = Fingerprint::of_bytes("pay", b"1");
    for at in 0..32 {
        let mut digest = *fingerprint.digest();
        digest[at] ^= 1;
        assert_ne!(Fingerprint::from_parts(Algorithm::V1, digest), fingerprint, "byte {at}");
    }
    assert_ne!(Fingerprint::from_parts(Algorithm::from_number(2), *fingerprint.digest()), fingerprint);
}

#[test]
fn debug_output_hides_the_digest() {
    assert_eq!(format!("{:?}", Fingerprint::of_bytes("pay", b"1")), "Fingerprint(v1, redacted)");
    assert_eq!(format!("{:?}", FingerprintBuilder::new(BodyFormat::Raw)), "FingerprintBuilder { .. }");
}

/// Bodies of which many are well-formed in one format, and some in none.
fn bodies() -> impl Strategy<Value = Vec<u8>> {
    let pieces: [&[u8]; 14] = [
        b"--b",
        b"\r\n",
        b"--",
        b"\r",
        b"--b--\r\n",
        b"{\"k\":[1,-2.5e3,\"\\ud83d\\ude00\"]}",
        b"[",
        b"]",
        b"true",
        b",",
        b"\"\xC3\xA9\\n\"",
        b" ",
        b"\xFF",
        MULTIPART,
    ];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..8).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn how_the_body_is_cut_does_not_matter(body in bodies(), cuts in prop::collection::vec(any::<Index>(), 0..6)) {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(body.len() + 1)).collect();
        cuts.extend([0, body.len()]);
        cuts.sort_unstable();
        for format in [BodyFormat::Raw, BodyFormat::json(), BodyFormat::multipart(&b"b"[..])] {
            let expected = whole(&format, &body);
            let pieces = cuts.windows(2).map(|cut| &body[cut[0]..cut[1]]);
            prop_assert_eq!(in_chunks(&format, pieces), expected);
            prop_assert_eq!(in_chunks(&format, body.chunks(1)), expected);
        }
    }

    #[test]
    fn different_raw_bodies_differ(one in any::<Vec<u8>>(), other in any::<Vec<u8>>()) {
        prop_assert_eq!(whole(&BodyFormat::Raw, &one) == whole(&BodyFormat::Raw, &other), one == other);
    }
}
