"""Cluster security: the cluster key, certificates of processes, TLS for internal connections, and who may call what.

authority        creates a cluster key and issues certificates from it
identity         role and process name in a certificate
credentials      certificates and TLS contexts of this process, renewed while it runs
join_token       one line that stands for the cluster key once
enrollment       server: exchanges join tokens for certificates, on the join port
used_tokens      join tokens that were used, remembered beside the cluster key
enrolled         client: credentials of a process that was started with a join token
secure_network   a Network whose connections are mutual TLS
access           which role may call which endpoint and register which key
exposure         refuses internal listeners that other machines reach without a key
"""
