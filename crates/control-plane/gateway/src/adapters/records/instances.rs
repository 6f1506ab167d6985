//! The gateways of a fleet that are alive, and the secrets that they share. Each gateway renews its row;
//! without a row, or with an expired row, a gateway counts as ended.

use std::collections::HashSet;

use super::{change_feed::SharedRegistry, postgres};
use crate::adapters::database::DatabaseError;

impl SharedRegistry {
    /// Marks the gateway `id` as alive, and returns all that are alive. Expired rows are deleted.
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

    /// Deletes the row of the gateway `id`, which ends.
    pub(in crate::adapters) async fn remove_presence(&self, id: &str) -> Result<(), DatabaseError> {
        let pool = self.session()?;
        let left = sqlx::query("DELETE FROM holobiont_gateways WHERE id = $1").bind(id);
        self.within(left.execute(&pool)).await.map(drop)
    }

    /// Returns the fleet's secret for the use `name`. The first gateway that asks stores `fresh`.
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
