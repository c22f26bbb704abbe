//! Objects that a handler leaves on its connection under the names of the store's tables.

use std::num::NonZeroU32;

use crate::support::Database;
use idem_core::{AcquireOutcome, Begin, IdempotencyStore, OwnerOutcome, StoreTransaction, TransactionalStore, Writes};
use idem_sqlite::{SqliteStore, SqliteTransaction};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, Row as _};

/// A store with one connection for all handlers.
async fn store(database: &Database) -> SqliteStore {
    let config = Database::config(&database.folder).max_transactions(NonZeroU32::MIN).clock(database.clock.clone());
    let store = SqliteStore::open(config).await.unwrap();
    sqlx::raw_sql("CREATE TABLE effects (id INTEGER PRIMARY KEY)").execute(store.pool()).await.unwrap();
    store
}

fn handlers(transaction: &mut dyn StoreTransaction) -> &mut SqliteConnection {
    transaction.as_any_mut().downcast_mut::<SqliteTransaction>().unwrap()
}

async fn number(connection: &mut SqliteConnection, question: &'static str) -> i64 {
    sqlx::query(question).fetch_one(connection).await.unwrap().get(0)
}

#[tokio::test]
async fn a_temporary_table_of_the_handlers_does_not_take_the_place_of_the_records() {
    let database = Database::new().await;
    let store = store(&database).await;
    let shadow = "CREATE TEMP TABLE idem_records AS SELECT * FROM main.idem_records;
        CREATE UNIQUE INDEX temp.by_id ON idem_records (id);INSERT INTO main.effects DEFAULT VALUES";
    for run in 1..=2 {
        let request = request();
        let Begin::Acquired { mut transaction, .. } = store.begin(&request).await.unwrap() else { panic!() };
        sqlx::raw_sql(shadow).execute(handlers(&mut *transaction)).await.unwrap();
        assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
        let repeated = store.acquire(&repeat_of(&request)).await.unwrap();
        assert!(matches!(repeated, AcquireOutcome::Replay(_)), "{repeated:?}");
        let effects = number(&mut store.pool().acquire().await.unwrap(), "SELECT count(*) FROM effects").await;
        assert_eq!(effects, run);
    }
}

#[tokio::test]
async fn no_handler_meets_what_another_one_has_left_on_its_connection() {
    let database = Database::new().await;
    let store = store(&database).await;
    let other = format!("ATTACH '{}' AS other", database.folder.path().join("other.db").display());
    for left in [
        "CREATE TEMP TABLE effects AS SELECT * FROM main.effects",
        "CREATE TEMP VIEW effects AS SELECT 1",
        "CREATE TEMP TRIGGER redirect AFTER INSERT ON main.effects BEGIN DELETE FROM effects; END",
        &other,
    ] {
        for writes in [Writes::Keep, Writes::Discard] {
            let Begin::Acquired { mut transaction, .. } = store.begin(&request()).await.unwrap() else { panic!() };
            sqlx::raw_sql(AssertSqlSafe(left.to_owned())).execute(handlers(&mut *transaction)).await.unwrap();
            transaction.finish(&completed(), KEPT, writes).await.unwrap();
            let Begin::Acquired { mut transaction, .. } = store.begin(&request()).await.unwrap() else { panic!() };
            let next = handlers(&mut *transaction);
            let temporary = number(next, "SELECT count(*) FROM sqlite_temp_master").await;
            let attached = number(next, "SELECT count(*) FROM pragma_database_list WHERE seq > 1").await;
            assert_eq!((temporary, attached), (0, 0), "{left}, {writes:?}");
        }
    }
}

#[test]
fn every_statement_of_the_crate_says_which_database_it_means() {
    let mut named = 0;
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = ["src", "migrations"].into_iter().flat_map(|files| std::fs::read_dir(folder.join(files)).unwrap());
    for file in files {
        let file = file.unwrap().path();
        let text = std::fs::read_to_string(&file).unwrap();
        for (place, _) in text.match_indices("idem_") {
            let (before, name) = text.split_at(place);
            let word = before.split_whitespace().last().unwrap_or_default();
            // The keywords before the name of a table or an index. An index is in the database of its table.
            let is_sql =
                ["TABLE", "FROM", "INTO", "UPDATE", "INDEX", "EXISTS"].iter().any(|keyword| word.ends_with(keyword));
            assert!(!is_sql, "{}: {}", file.display(), &name[..20.min(name.len())]);
            named += usize::from(word == "main.");
        }
    }
    assert!(named > 10, "only {named} names were found");
}
