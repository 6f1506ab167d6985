//! Which gateways of a fleet are alive: each renews its row, and counts as gone once the row is missing or out of date. And the
//! secrets that all of them have.

use std::collections::HashSet;

use super::{change_feed::SharedRegistry, postgres};
use crate::adapters::database::DatabaseError;

impl SharedRegistry {
    /// Says that the gateway `id` is alive, and returns all that are. Rows of those that are gone are removed.
    pub(in crate::adapters) async fn renew_presence(
        &self,
        id: &str,
    ) -> Result<HashSet<String>, DatabaseError> {
        const LIVING: &str = "SELECT id FROM holobiont_gateways WHERE until > now()";
        let pool = self.session()?;
        let asked = async {
            let mut connection = pool.acquire().await?;
            postgres::renew(&mut connection, id).await?;
            sqlx::query("DELETE FROM holobiont_gateways WHERE until < now()")
                .execute(&mut *connection)
                .await?;
            sqlx::query_scalar(LIVING).fetch_all(&mut *connection).await
        };
        Ok(self.within(asked).await?.into_iter().collect())
    }

    /// Says that the gateway `id` ends.
    pub(in crate::adapters) async fn remove_presence(&self, id: &str) -> Result<(), DatabaseError> {
        let pool = self.session()?;
        let left = sqlx::query("DELETE FROM holobiont_gateways WHERE id = $1").bind(id);
        self.within(left.execute(&pool)).await.map(drop)
    }

    /// The secret of all gateways of the fleet for a use; the first that asks for it brings `fresh`.
    pub(in crate::adapters) async fn secret(
        &self,
        name: &str,
        fresh: [u8; 32],
    ) -> Result<[u8; 32], DatabaseError> {
        let pool = self.session()?;
        let asked = async {
            let brought = sqlx::query(
                "INSERT INTO holobiont_secrets (name, secret) VALUES ($1, $2) ON CONFLICT DO NOTHING",
            );
            brought.bind(name).bind(fresh.as_slice()).execute(&pool).await?;
            let secret =
                sqlx::query_scalar("SELECT secret FROM holobiont_secrets WHERE name = $1").bind(name);
            let secret: Vec<u8> = secret.fetch_one(&pool).await?;
            secret.try_into().map_err(|_| sqlx::Error::Decode("a secret has not 32 bytes".into()))
        };
        self.within(asked).await
    }
}
