//! PostgreSQL over TLS; a gateway without its certificate authority cannot connect.

use std::{fs, path::Path};

use gateway::adapters::{FleetStorage, OpenError, PostgresAddress};

use crate::{
    servers::{self, postgres::Postgres, s3::Bucket},
    support::{FleetHost, fleet},
};

fn certified(folder: &Path, name: &str) -> (String, String) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let path = folder.join(name);
    fs::write(&path, made.cert.pem()).unwrap();
    (path.display().to_string(), made.signing_key.serialize_pem())
}

async fn host(postgres: &Postgres, bucket: &Bucket, parameters: &str) -> Result<FleetHost, OpenError> {
    let registry = PostgresAddress::parse(&format!("{}?{parameters}", postgres.url())).unwrap();
    let fleet = FleetStorage { registry, ..fleet(postgres, bucket, 1 << 30) };
    FleetHost::of(tempfile::tempdir().unwrap(), Some(fleet)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgresql_is_reached_over_tls_and_one_with_another_certificate_is_not_believed() {
    let Some((postgres, bucket)) = servers::both() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = certified(folder.path(), "its.pem");
    let (other, _) = certified(folder.path(), "other.pem");
    postgres.encrypt(&fs::read_to_string(&certificate).unwrap(), &key);

    let trusting = format!("sslmode=verify-full&sslrootcert={certificate}");
    let one = host(&postgres, &bucket, &trusting).await.unwrap();
    let two = host(&postgres, &bucket, &trusting).await.unwrap();
    one.load("a", "first").await.unwrap();
    two.hears(&one, "a").await;
    two.ask("a").await.unwrap();
    let bare = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
                WHERE application_name = 'holobiont' AND NOT ssl";
    let covered = bare.replace("NOT ssl", "ssl");
    assert_eq!(postgres.ask(bare), "0");
    assert!(postgres.ask(&covered).parse::<u32>().unwrap() >= 2, "both listen");

    for refused in [format!("sslmode=verify-full&sslrootcert={other}"), "sslmode=disable".to_owned()] {
        let said = host(&postgres, &bucket, &refused).await.map(drop).expect_err(&refused).to_string();
        let word = if refused.ends_with("disable") { "encryption" } else { "certificate" };
        assert!(said.contains(word) && said.contains("127.0.0.1"), "{said}");
    }
}
