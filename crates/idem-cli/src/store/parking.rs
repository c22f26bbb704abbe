//! The parking of an inbox, in the database that a URL names.

use std::error::Error;
use std::time::Duration;

use idem_inbox::Parking;

/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(10);

const NO_TABLE: &str =
    "there is no table idem_inbox, so no consumer has parked messages there; the schema of the parking is --schema";

#[cfg(feature = "postgres")]
pub(super) async fn postgres(url: &str, schema: &str) -> Result<Box<dyn Parking>, Box<dyn Error>> {
    use idem_inbox::PostgresParking;

    let options = sqlx::postgres::PgPoolOptions::new().max_connections(1).acquire_timeout(CONNECT);
    let pool = options.connect(url).await?;
    let table = "SELECT EXISTS (SELECT FROM pg_catalog.pg_tables WHERE schemaname = $1 AND tablename = 'idem_inbox')";
    if !sqlx::query_scalar::<_, bool>(table).bind(schema).fetch_one(&pool).await? {
        return Err(NO_TABLE.into());
    }
    Ok(Box::new(PostgresParking::open(pool, schema).await?))
}

#[cfg(feature = "sqlite")]
pub(super) async fn sqlite(url: &str) -> Result<Box<dyn Parking>, Box<dyn Error>> {
    use idem_inbox::SqliteParking;

    let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1).acquire_timeout(CONNECT);
    let pool = options.connect(url).await?;
    let table = "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'idem_inbox')";
    if !sqlx::query_scalar::<_, bool>(table).fetch_one(&pool).await? {
        return Err(NO_TABLE.into());
    }
    Ok(Box::new(SqliteParking::open(pool).await?))
}
