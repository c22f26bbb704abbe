//! Where the options of the store's own connections come from.

use std::fmt;

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgPool};

/// The `application_name` of sessions for which none is set, so that operators recognise them.
const APPLICATION_NAME: &str = "idem";

/// Where the options of the store's own connections come from.
#[derive(Clone)]
pub(crate) enum ConnectSource {
    Options(Box<PgConnectOptions>),
    /// A pool of the application, whose options may change while it is open.
    Pool(PgPool),
}

impl ConnectSource {
    /// The options as they are now.
    pub(crate) fn options(&self) -> PgConnectOptions {
        let options = match self {
            Self::Options(options) => (**options).clone(),
            Self::Pool(pool) => (*pool.connect_options()).clone(),
        };
        let options = match options.get_application_name() {
            Some(_) => options,
            None => options.application_name(APPLICATION_NAME),
        };
        // Statements of the store carry stored answers, which do not belong in logs. Some proxies refuse start-up parameters
        // that they do not know, and nothing here reads floating-point numbers.
        options.disable_statement_logging().extra_float_digits(None)
    }

    /// The pool of the application, if there is one.
    pub(crate) fn pool(&self) -> Option<&PgPool> {
        match self {
            Self::Options(_) => None,
            Self::Pool(pool) => Some(pool),
        }
    }
}

/// Omits the options, which contain a password.
impl fmt::Debug for ConnectSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Options(_) => "Options",
            Self::Pool(_) => "Pool",
        })
    }
}
