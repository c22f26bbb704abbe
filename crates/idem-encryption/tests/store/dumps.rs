//! What a reader of the store finds: no key, header field, body or checkpoint.

use std::sync::Arc;

use bytes::Bytes;
use idem_core::{
    Acquire, Checkpoint, HeaderField, IdempotencyKey, IdempotencyStore, MemoryStore, Origin, RecordIdentity, Scope,
    Settlement, StoredBody, StoredResponse, TimeOffset,
};
use idem_encryption::{EncryptedStore, EncryptionConfig};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_redis::{RedisConfig, RedisFastStore, RedisStore};
use idem_schemas::Schema;
use idem_servers::{Reply, redis_command};
use idem_testkit::fixture::{BACKOFF, request};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};

use crate::support::{File, config, fresh_prefix, lease, memory, postgres, settle};

const KEY: &str = "canary-of-the-key";
const PRINCIPAL: &str = "canary-of-the-principal";
const OPERATION: &str = "canary-of-the-operation";
/// What is sealed.
const SECRETS: [&str; 5] = [
    "canary-of-a-header-name",
    "canary-of-a-header-value",
    "canary-of-the-body",
    "canary-of-a-checkpoint-name",
    "canary-of-the-checkpoint-data",
];

/// How often each text is in a dump: as bytes, and in the hexadecimal form of Postgres.
fn occurrences(dump: &[u8], text: &str) -> usize {
    let hexadecimal: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    let count = |needle: &[u8]| dump.windows(needle.len()).filter(|window| *window == needle).count();
    count(text.as_bytes()) + count(hexadecimal.as_bytes())
}

fn found(dump: &[u8], texts: &[&'static str]) -> Vec<&'static str> {
    texts.iter().copied().filter(|text| occurrences(dump, text) > 0).collect()
}

fn answer() -> StoredResponse {
    let headers = [HeaderField { name: SECRETS[0].into(), value: SECRETS[1].into() }];
    // Longer than what fits a page of SQLite.
    let body: Bytes = SECRETS[2].repeat(500).into();
    StoredResponse { headers: headers.into(), body: StoredBody::Retained(body), ..StoredResponse::new(201, "") }
}

fn request_of(step: u8) -> Acquire {
    let scope = Scope::new(PRINCIPAL, OPERATION);
    let key: IdempotencyKey = format!("{KEY}-{step}").parse().unwrap();
    let id = RecordIdentity::new("dumps").record_id(&scope, &key);
    Acquire { id, origin: Origin { namespace: "dumps".into(), scope }, ..request() }
}

/// One record of each kind that has something to hide.
async fn fill<S: IdempotencyStore + ?Sized>(store: &S) {
    let settlements = [
        None,
        Some(Settlement::Completed(answer())),
        Some(Settlement::FailedTerminal(answer())),
        Some(Settlement::FailedRetryable { response: answer(), retry_after: BACKOFF }),
    ];
    for (step, settlement) in settlements.iter().enumerate() {
        let lease = lease(store, &request_of(step as u8)).await;
        let checkpoint = Checkpoint { sequence: 1, name: SECRETS[3].into(), data: SECRETS[4].into() };
        store.checkpoint(&lease, &checkpoint).await.unwrap();
        if let Some(settlement) = settlement {
            settle(store, &lease, settlement).await;
        }
    }
}

/// The database, its write-ahead log and its shared memory, while it is open.
fn dump_of_file(file: &File) -> Vec<u8> {
    let files = std::fs::read_dir(file.folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.collect();
    assert!(files.iter().any(|path| path.extension().is_some_and(|end| end == "db-wal")), "{files:?}");
    files.iter().flat_map(|path| std::fs::read(path).unwrap()).collect()
}

#[tokio::test]
async fn a_file_and_its_log_show_nothing() {
    let plain = File::new().await;
    fill(&*plain.store).await;
    assert_eq!(found(&dump_of_file(&plain), &SECRETS), SECRETS, "the search finds what is there");
    assert_eq!(found(&dump_of_file(&plain), &[KEY, PRINCIPAL, OPERATION]), [PRINCIPAL, OPERATION]);
    let sealed = File::new().await;
    fill(&sealed.encrypted(config())).await;
    assert_eq!(found(&dump_of_file(&sealed), &SECRETS), [""; 0]);
    assert_eq!(found(&dump_of_file(&sealed), &[KEY, PRINCIPAL, OPERATION]), [PRINCIPAL, OPERATION]);
    let hashed = File::new().await;
    fill(&hashed.encrypted(config().hashing_scopes([9; 32]))).await;
    assert_eq!(found(&dump_of_file(&hashed), &SECRETS), [""; 0]);
    assert_eq!(found(&dump_of_file(&hashed), &[KEY, PRINCIPAL, OPERATION]), [""; 0]);
}

/// All columns of all tables and views of a schema, as text.
async fn dump_of_schema(schema: &Schema) -> Vec<u8> {
    let mut connection = PgConnection::connect(&idem_servers::postgres_url()).await.unwrap();
    let tables = "SELECT table_name::text FROM information_schema.tables WHERE table_schema = $1";
    let tables = sqlx::query(tables).bind(&schema.name).fetch_all(&mut connection).await.unwrap();
    assert!(tables.len() > 3, "the schema has tables");
    let mut dump = Vec::new();
    for table in tables {
        let rows = format!("SELECT dumped::text FROM {}.{} AS dumped", schema.name, table.get::<String, _>(0));
        for row in sqlx::raw_sql(AssertSqlSafe(rows)).fetch_all(&mut connection).await.unwrap() {
            dump.extend_from_slice(row.get::<String, _>(0).as_bytes());
        }
    }
    dump
}

#[tokio::test]
async fn a_schema_shows_nothing() {
    let (plain, sealed, offset) = (Schema::new(), Schema::new(), TimeOffset::default());
    fill(&*postgres(&plain, &offset).await).await;
    let dump = dump_of_schema(&plain).await;
    assert_eq!(found(&dump, &SECRETS), SECRETS, "the search finds what is there");
    assert_eq!(found(&dump, &[KEY, PRINCIPAL, OPERATION]), [PRINCIPAL, OPERATION]);
    let config = config().hashing_scopes([9; 32]);
    fill(&EncryptedStore::new(postgres(&sealed, &offset).await, config)).await;
    let dump = dump_of_schema(&sealed).await;
    assert!(occurrences(&dump, "idem-sealed") > 0, "the records are in the dump");
    assert_eq!(found(&dump, &SECRETS), [""; 0]);
    assert_eq!(found(&dump, &[KEY, PRINCIPAL, OPERATION]), [""; 0]);
}

fn redis(words: &[&[u8]]) -> Reply {
    let url = idem_servers::redis_url();
    let digits = url.rsplit(':').next().unwrap().trim_end_matches(|letter: char| !letter.is_ascii_digit());
    redis_command(digits.parse::<u16>().unwrap(), words).unwrap()
}

fn bytes_of(reply: Reply, into: &mut Vec<u8>) {
    match reply {
        Reply::Bytes(bytes) => into.extend(bytes),
        Reply::Array(replies) => replies.into_iter().for_each(|reply| bytes_of(reply, into)),
        _ => {}
    }
}

/// All keys of a prefix, and their values.
fn dump_of_redis(prefix: &str) -> Vec<u8> {
    let Reply::Array(keys) = redis(&[b"KEYS", format!("{prefix}*").as_bytes()]) else { panic!("an array of keys") };
    let mut dump = Vec::new();
    for key in keys {
        let Reply::Bytes(key) = key else { panic!("{key:?}") };
        dump.extend_from_slice(&key);
        let Reply::Status(kind) = redis(&[b"TYPE", &key]) else { panic!("a type") };
        let value = match &*kind {
            "string" => redis(&[b"GET", &key]),
            "hash" => redis(&[b"HGETALL", &key]),
            "list" => redis(&[b"LRANGE", &key, b"0", b"-1"]),
            "zset" => redis(&[b"ZRANGE", &key, b"0", b"-1"]),
            "none" => continue,
            other => panic!("no reader for {other}"),
        };
        bytes_of(value, &mut dump);
    }
    dump
}

#[tokio::test]
async fn redis_shows_nothing() {
    let open = async |prefix: &str| {
        let config = RedisConfig::new(idem_servers::redis_url()).key_prefix(prefix);
        Arc::new(RedisStore::open(config.timeout(std::time::Duration::from_secs(10))).await.unwrap())
    };
    let (plain, sealed) = (fresh_prefix(), fresh_prefix());
    fill(&*open(&plain).await).await;
    assert_eq!(found(&dump_of_redis(&plain), &SECRETS), SECRETS, "the search finds what is there");
    fill(&EncryptedStore::new(open(&sealed).await, config())).await;
    let dump = dump_of_redis(&sealed);
    assert!(occurrences(&dump, "idem-sealed") > 0, "the records are in the dump");
    assert_eq!(found(&dump, &SECRETS), [""; 0]);
    assert_eq!(found(&dump, &[KEY, PRINCIPAL, OPERATION]), [""; 0]);
}

/// A hybrid store copies records into its cache. Wrapped as a whole, it copies sealed ones.
#[tokio::test]
async fn a_cache_shows_nothing() {
    let (prefix, patience) = (fresh_prefix(), std::time::Duration::from_secs(10));
    let redis = RedisConfig::new(idem_servers::redis_url()).key_prefix(&prefix).timeout(patience);
    let fast = Arc::new(RedisFastStore::new(redis).unwrap());
    let durable = Arc::new(MemoryStore::new(std::num::NonZeroUsize::MAX));
    let hybrid = HybridStore::new(durable, fast, HybridConfig::new().patience(patience));
    let store = EncryptedStore::new(Arc::new(hybrid), config());
    fill(&store).await;
    for _ in 0..1_000 {
        if occurrences(&dump_of_redis(&prefix), "idem-sealed") > 0 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let dump = dump_of_redis(&prefix);
    assert!(occurrences(&dump, "idem-sealed") > 0, "no copy came");
    assert_eq!(found(&dump, &SECRETS), [""; 0]);
}

/// The other way round, the cache would have plaintext. It has no copies then.
#[tokio::test]
async fn a_cache_in_front_of_encryption_shows_nothing() {
    let (prefix, patience) = (fresh_prefix(), std::time::Duration::from_secs(10));
    let redis = RedisConfig::new(idem_servers::redis_url()).key_prefix(&prefix).timeout(patience);
    let fast = Arc::new(RedisFastStore::new(redis).unwrap());
    let sealed = Arc::new(memory(config()).0);
    let faults = idem_testkit::Faults::default();
    let durable = Arc::new(faults.wrap(sealed));
    let store = HybridStore::new(durable, fast, HybridConfig::new().patience(patience));
    fill(&store).await;
    // With a cache, a repeat waits until the copy is there.
    for settled in [1, 2] {
        let repeat = Acquire { owner: idem_core::OwnerToken::random(), ..request_of(settled) };
        let repeat = Acquire { fingerprint: store.peek(&repeat.id).await.unwrap().unwrap().fingerprint, ..repeat };
        assert_eq!(crate::support::replayed(store.acquire(&repeat).await), answer());
    }
    assert_eq!(store.metrics().fast_replays, 0);
    let dump = dump_of_redis(&prefix);
    assert!(!dump.is_empty(), "the lock of a run");
    assert_eq!(found(&dump, &SECRETS), [""; 0]);
}

#[test]
fn debug_output_shows_no_key_and_no_secret() {
    let canary = *b"canary-of-a-key-of-32-bytes-----";
    let keys = idem_encryption::Keys::new(7, canary).with_old(8, [1; 32]).unwrap();
    let config = EncryptionConfig::new(keys).hashing_scopes(canary);
    let shown = format!("{config:?}");
    let shown = format!("{shown} {:?}", memory(config).0);
    assert!(shown.contains("Keys(primary 7, old [8])"), "{shown}");
    let numbers: Vec<String> = canary[..6].iter().map(u8::to_string).collect();
    assert!(!shown.contains("canary") && !shown.contains(&numbers.join(", ")), "{shown}");
}
